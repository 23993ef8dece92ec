//! The embedding: a table row in every stream.

use half::bf16;
use kernels::embed::{Args, Embed, EmbedFeatures, FeatureArgs};
use kernels::numerics::Element;
use kernels::state::RowRange;
use kernels::table::Fact;
use tests::check::{Draw, Scene, facts, poisoned, same};

use crate::ops::formula::ROWS;

tests::tests! {
    any: every_stream_holds_the_table_row_in_bf16, every_stream_holds_the_feature_in_bf16;
    host: every_stream_holds_the_table_row_in_f32, every_stream_holds_the_feature_in_f32, an_id_past_the_vocabulary_is_a_fault, sizes_without_a_meaning_are_refused;
}

const VOCAB: usize = 50;
const STREAMS: usize = 3;
const HIDDEN: usize = 21;
const WIDTH: usize = STREAMS * HIDDEN;

fn args<E: Element>(scene: &mut Scene, table: &[E], first: usize, ids: &[u32]) -> Args {
    let mut facts: Vec<Fact> = facts(&[(1, first), (0, ids.len())]);
    // Rows before the range have an id that would be refused.
    facts.iter_mut().for_each(|fact| fact.id = u32::MAX);
    facts[first..].iter_mut().zip(ids).for_each(|(fact, &id)| fact.id = id);
    Args {
        rows: RowRange { facts: scene.input("facts", &facts), first: first as u32, count: ids.len() as u32 },
        table: scene.input("table", table).cast(),
        streams: scene.output::<E>("streams", (first + ids.len()) * WIDTH).cast(),
        vocab: (table.len() / HIDDEN) as u32,
        hidden: HIDDEN as u32,
        count: STREAMS as u32,
        zero: 0,
    }
}

fn run<E: Element>(table: &[E], first: usize, ids: &[u32]) -> Vec<E> {
    let mut scene = Scene::new();
    let args = args(&mut scene, table, first, ids);
    scene.run::<Embed<E>>(&args);
    let streams = scene.read(args.streams.cast::<E>(), (first + ids.len()) * WIDTH);
    poisoned("rows before the range", &streams[..first * WIDTH]);
    streams[first * WIDTH..].to_vec()
}

fn embeds<E: Element>() {
    let mut draw = Draw::new(1);
    let table: Vec<E> = draw.elements(VOCAB * HIDDEN, 1.0);
    for rows in ROWS {
        let mut ids: Vec<u32> = (0..rows).map(|_| draw.below(VOCAB) as u32).collect();
        ids[rows / 2] = 0;
        ids[rows - 1] = VOCAB as u32 - 1;
        let streams = run(&table, rows % 4, &ids);
        for (row, id) in streams.chunks(WIDTH).zip(&ids) {
            for stream in row.chunks(HIDDEN) {
                same(&format!("id {id} among {rows}"), stream, &table[*id as usize * HIDDEN..][..HIDDEN]);
            }
            same("row", row, &run(&table, 0, &[*id]));
        }
    }
}

fn every_stream_holds_the_table_row_in_f32() {
    embeds::<f32>();
}

fn every_stream_holds_the_table_row_in_bf16() {
    embeds::<bf16>();
}

fn features<E: Element>() {
    let mut draw = Draw::new(2);
    for (rows, hidden) in [(1, 1), (3, 21), (65, 8), (5, 2560)] {
        let mut scene = Scene::new();
        let features: Vec<E> = draw.elements(rows * hidden, 1.0);
        let streams = scene.output::<E>("streams", (rows + 2) * STREAMS * hidden);
        let args = FeatureArgs {
            features: scene.input("features", &features).cast(),
            streams: streams.at(STREAMS * hidden).cast(),
            rows: rows as u32,
            hidden: hidden as u32,
            count: STREAMS as u32,
            zero: 0,
        };
        scene.run::<EmbedFeatures<E>>(&args);
        let got = scene.read(streams, (rows + 2) * STREAMS * hidden);
        let mut streams = got.chunks(hidden);
        for around in streams.by_ref().take(STREAMS) {
            poisoned("the row before", around);
        }
        for feature in features.chunks(hidden) {
            for stream in streams.by_ref().take(STREAMS) {
                same(&format!("{rows} rows of {hidden}"), stream, feature);
            }
        }
        streams.for_each(|around| poisoned("the row after", around));
        for args in [
            FeatureArgs { rows: 0, ..args },
            FeatureArgs { hidden: 0, ..args },
            FeatureArgs { count: 0, ..args },
        ] {
            let why = Scene::new().refused::<EmbedFeatures<E>>(&args);
            assert!(why.contains("all positive"), "{why}");
        }
    }
}

fn every_stream_holds_the_feature_in_bf16() {
    features::<bf16>();
}

fn every_stream_holds_the_feature_in_f32() {
    features::<f32>();
}

fn an_id_past_the_vocabulary_is_a_fault() {
    for id in [4, u32::MAX] {
        let mut scene = Scene::new();
        let args = args(&mut scene, &[0.5f32; 4 * HIDDEN], 0, &[3, id]);
        let why = scene.domain_fault::<Embed<f32>>(&args);
        assert!(why.contains(&format!("id {id} is past the vocabulary of 4")), "{why}");
    }
}

fn sizes_without_a_meaning_are_refused() {
    let mut scene = Scene::new();
    let args = args(&mut scene, &[0.5f32; HIDDEN], 0, &[0]);
    let no_rows = RowRange { count: 0, ..args.rows };
    for args in [Args { rows: no_rows, ..args }, Args { hidden: 0, ..args }, Args { count: 0, ..args }] {
        let why = scene.refused::<Embed<f32>>(&args);
        assert!(why.contains("all positive"), "{why}");
    }
}
