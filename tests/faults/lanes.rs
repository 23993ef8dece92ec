//! The buffer digest of a slab: every part of it tells two slabs apart that need different launches.

use std::sync::Arc;

use graph::{Digest, Digester};
use kernels::numerics::ElementType;
use kernels::table::Kind;
use runtime::config::ModelConfig;
use runtime::lanes::{LaneLayout, Lanes, PagePool};
use runtime::model::{Group, Picks, RoundShape};
use tests::fixture::Fixture;

use crate::fixture;

/// The emissions of a decode round and of a piece of a prompt on this slab.
fn emissions(fixture: &Fixture, lanes: &Lanes) -> [Digest; 2] {
    [Kind::Decode, Kind::Prompt].map(|kind| {
        let groups = [Group { lanes, rows: 2 }];
        let shape = RoundShape { kind, groups: &groups, picks: Picks::All };
        fixture.runner.emission(&shape).expect("legal launches").digest()
    })
}

/// The digest as it would be without one part.
fn without(part: &str, lanes: &Lanes) -> Digest {
    let mut digest = Digester::new();
    for (name, value) in lanes.baked() {
        if name != part {
            digest.digest(value);
        }
    }
    digest.finish()
}

/// The parts in which two slabs differ.
fn differences(a: &Lanes, b: &Lanes) -> Vec<&'static str> {
    let pairs = a.baked().into_iter().zip(b.baked());
    pairs.filter(|(a, b)| a.1 != b.1).map(|(a, _)| a.0).collect()
}

/// The slab with something changed.
fn changed(lanes: &Lanes, change: impl FnOnce(&mut Lanes)) -> Lanes {
    let mut lanes = lanes.clone();
    change(&mut lanes);
    lanes
}

/// The slab with another layout.
fn laid_out(lanes: &Lanes, change: impl FnOnce(&mut LaneLayout)) -> Lanes {
    let mut layout = (*lanes.layout).clone();
    change(&mut layout);
    changed(lanes, |lanes| lanes.layout = Arc::new(layout))
}

/// The slab with the spans of a model that has other settings, and everything else as it was.
fn spans_of(fixture: &Fixture, change: impl FnOnce(&mut ModelConfig)) -> Lanes {
    let mut config = fixture.runner.model.config.clone();
    change(&mut config);
    laid_out(&fixture.lanes, |layout| {
        let page_bytes = layout.page_bytes;
        *layout = LaneLayout::new(&config, ElementType::Bf16, 256);
        layout.page_bytes = page_bytes;
    })
}

#[test]
fn without_any_part_two_slabs_that_differ_share_a_graph() {
    let fixture = fixture(3);
    let (device, lanes) = (&fixture.runner.device, &fixture.lanes);
    let (layout, pool) = (&lanes.layout, &lanes.pool);
    let other_slab = Lanes::new(device, 0, layout.clone(), 3, pool.clone()).expect("memory");
    let other_pool = PagePool::new(device, layout, pool.pages).expect("memory");
    let twins = [
        ("number", changed(lanes, |lanes| lanes.number = 1)),
        ("slab", other_slab),
        ("pool", changed(lanes, |lanes| lanes.pool = other_pool)),
        ("pages", changed(lanes, |lanes| lanes.pool.pages -= 1)),
        ("page bytes", laid_out(lanes, |layout| layout.page_bytes += 256)),
        ("pages per lane", laid_out(lanes, |layout| layout.pages_per_lane -= 1)),
        ("spans", spans_of(&fixture, |config| config.vocab_size += 64)),
        ("spans", spans_of(&fixture, |config| config.indexer_compress_ratio *= 2)),
    ];
    let expected = emissions(&fixture, lanes);
    assert_eq!(emissions(&fixture, &lanes.clone()), expected);
    assert_eq!(lanes.clone().digest(), lanes.digest());
    for (part, twin) in &twins {
        assert_eq!(differences(lanes, twin), [*part]);
        for (kind, (a, b)) in emissions(&fixture, twin).into_iter().zip(expected).enumerate() {
            assert_ne!(a, b, "launches of kind {kind} bake the {part}");
        }
        assert_ne!(twin.digest(), lanes.digest(), "{part}");
        // The planted fault: with this part left out, the graph of one slab would be replayed for the other.
        assert_eq!(without(part, twin), without(part, lanes), "{part}");
    }
    // Nothing was forgotten: the element has a test of its own.
    for (name, _) in lanes.baked() {
        assert!(name == "element" || twins.iter().any(|(part, _)| *part == name), "{name}");
    }
}

/// Launches take their element from the model, so today no two slabs differ in it alone: elements of another
/// size move the spans.
#[test]
fn the_element_of_a_slab_is_implied_by_its_spans() {
    let fixture = fixture(3);
    let lanes = &fixture.lanes;
    let relabelled = laid_out(lanes, |layout| layout.element = ElementType::F32);
    assert_eq!(differences(lanes, &relabelled), ["element"]);
    assert_eq!(emissions(&fixture, &relabelled), emissions(&fixture, lanes));

    let wide = LaneLayout::new(&fixture.runner.model.config, ElementType::F32, 256);
    let wide = changed(lanes, |lanes| lanes.layout = Arc::new(wide));
    assert_eq!(differences(lanes, &wide), ["page bytes", "spans", "element"]);
    assert_ne!(without("element", &wide), without("element", lanes));
    assert_ne!(emissions(&fixture, &wide), emissions(&fixture, lanes));
}

/// A slab owns its arena, and no two arenas share an epoch: stride and number of slots cannot differ while
/// the arena is the same.
#[test]
fn the_stride_and_the_slots_of_a_slab_are_implied_by_its_arena() {
    let fixture = fixture(3);
    let (device, lanes) = (&fixture.runner.device, &fixture.lanes);
    for slots in [3, 4] {
        let other = Lanes::new(device, 0, lanes.layout.clone(), slots, lanes.pool.clone()).expect("memory");
        assert_ne!(other.slab.arena().epoch(), lanes.slab.arena().epoch());
        assert_eq!(differences(lanes, &other), ["slab"]);
        assert_ne!(emissions(&fixture, &other), emissions(&fixture, lanes));
    }
}
