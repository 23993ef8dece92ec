//! Placeholders and positions, beyond the recorded prompts.

use proptest::prelude::*;
use vision::{
    ExpandError, Expanded, Grid, MediaIds, Medium, Position, PositionError, Span, Start, expand, three_axis,
};

const IDS: MediaIds = MediaIds { image: 900, video: 901, start: 902, end: 903 };

fn picture(height: u32, width: u32) -> Medium {
    Medium::Picture { grid: Grid { pairs: 1, height, width } }
}

fn video(height: u32, width: u32, stamps: &[f64]) -> Medium {
    Medium::Video { grid: Grid { pairs: stamps.len() as u32, height, width }, stamps: stamps.to_vec() }
}

/// A tokenizer of letters.
fn letters(text: &str) -> Result<Vec<u32>, String> {
    Ok(text.chars().map(u32::from).collect())
}

fn expanded(ids: &[u32], media: &[Medium]) -> Result<Expanded, ExpandError> {
    expand(ids, media, 2, &IDS, letters)
}

#[test]
fn pads_belong_to_media_of_their_kind_in_order() {
    let media = [video(2, 2, &[0.25, 1.25]), picture(2, 4), picture(4, 2)];
    let got = expanded(&[1, 902, 900, 903, 2, 902, 901, 903, 900, 3], &media).unwrap();
    let stamp = |text| letters(text).unwrap();
    let expected = [
        vec![1, 902, 900, 900, 903, 2, 902],
        stamp("<0.2 seconds>"),
        vec![902, 901, 903],
        stamp("<1.2 seconds>"),
        vec![902, 901, 903, 903, 900, 900, 3],
    ];
    assert_eq!(got.ids, expected.concat());
    let span = |medium, row, first, height, width| Span { medium, row, first, height, width };
    let spans = [span(1, 0, 2, 1, 2), span(0, 0, 21, 1, 1), span(0, 1, 37, 1, 1), span(2, 0, 40, 2, 1)];
    assert_eq!(got.spans, spans);
    for span in &got.spans {
        assert!(got.ids[span.first..][..span.rows()].iter().all(|id| [900, 901].contains(id)));
    }
}

#[test]
fn counts_that_differ_are_named() {
    let error = expanded(&[900, 900], &[picture(2, 2)]).unwrap_err();
    assert_eq!(error, ExpandError::Pads { kind: "picture", id: 900, pads: 2, media: 1 });
    assert!(error.to_string().contains("2 picture placeholders (id 900) for 1 picture"), "{error}");
    let error = expanded(&[900], &[picture(2, 2), video(2, 2, &[0.0])]).unwrap_err();
    assert_eq!(error, ExpandError::Pads { kind: "video", id: 901, pads: 0, media: 1 });
    let error = expanded(&[901], &[video(2, 2, &[])]).unwrap_err();
    assert!(matches!(error, ExpandError::Medium { index: 0, .. }), "{error}");
    let error = expanded(&[900], &[picture(3, 2)]).unwrap_err();
    assert!(matches!(error, ExpandError::Medium { index: 0, .. }), "{error}");
    let error = expand(&[901], &[video(2, 2, &[0.0])], 2, &IDS, |_| Err("no")).unwrap_err();
    assert_eq!(error, ExpandError::Stamp { text: "<0.0 seconds>".into(), detail: "no".into() });
}

#[test]
fn the_example_of_the_documentation() {
    let span = Span { medium: 0, row: 0, first: 3, height: 2, width: 3 };
    let walk = three_axis(Start::default(), 11, &[span]).unwrap();
    let axis = |of: fn(&Position) -> i32| walk.tokens.iter().map(of).collect::<Vec<i32>>();
    assert_eq!(axis(|p| p.time), [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]);
    assert_eq!(axis(|p| p.row), [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]);
    assert_eq!(axis(|p| p.column), [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]);
    assert_eq!(walk.offset(), -3);
    // The next token is decoded.
    assert_eq!(walk.end, Start { index: 11, position: 8 });
}

#[test]
fn pictures_that_touch_are_two() {
    let span = |first| Span { medium: 0, row: 0, first, height: 1, width: 2 };
    let walk = three_axis(Start::default(), 4, &[span(0), span(2)]).unwrap();
    assert_eq!(walk.tokens.iter().map(|p| p.time).collect::<Vec<_>>(), [0, 0, 2, 2]);
}

#[test]
fn spans_that_do_not_fit_are_refused() {
    let span = |first, height, width| Span { medium: 0, row: 0, first, height, width };
    let refused = |start, tokens, spans: &[Span]| three_axis(start, tokens, spans).unwrap_err();
    let begin = Start::default();
    let error = refused(begin, 9, &[span(0, 2, 2), span(3, 1, 1)]);
    assert_eq!(error, PositionError::Overlap { span: 1, first: 3, free: 4 });
    let error = refused(begin, 9, &[span(6, 2, 2)]);
    assert_eq!(error, PositionError::Outside { span: 0, end: 10, tokens: 9 });
    let error = refused(Start { index: 8, position: 4 }, 9, &[span(7, 1, 1)]);
    assert_eq!(error, PositionError::Overlap { span: 0, first: 7, free: 8 });
    let error = refused(begin, usize::MAX, &[]);
    assert_eq!(error, PositionError::TooFar { tokens: usize::MAX });
    let error = refused(begin, 9, &[span(0, u32::MAX, u32::MAX)]);
    assert!(matches!(error, PositionError::Outside { span: 0, .. }));
}

fn prompts() -> impl Strategy<Value = (Vec<u32>, Vec<Medium>)> {
    let side = || (1u32..5).prop_map(|n| 2 * n);
    let medium = prop_oneof![
        (side(), side()).prop_map(|(h, w)| picture(h, w)),
        (side(), side(), prop::collection::vec(0.0..99.0f64, 1..4))
            .prop_map(|(h, w, stamps)| video(h, w, &stamps)),
    ];
    prop::collection::vec((0usize..9, medium), 0..6).prop_map(|parts| {
        let mut ids = Vec::new();
        let mut media = Vec::new();
        for (text, medium) in parts {
            ids.extend(0..text as u32);
            ids.push(if matches!(medium, Medium::Picture { .. }) { IDS.image } else { IDS.video });
            media.push(medium);
        }
        ids.extend([7, 8]);
        (ids, media)
    })
}

proptest! {
    /// Placeholders are those of the spans and no others, and every row of every medium has one.
    #[test]
    fn spans_hold_all_placeholders((ids, media) in prompts()) {
        let got = expanded(&ids, &media).unwrap();
        let pads: Vec<usize> = (0..got.ids.len()).filter(|at| [900, 901].contains(&got.ids[*at])).collect();
        let held: Vec<usize> =
            got.spans.iter().flat_map(|span| span.first..span.first + span.rows()).collect();
        prop_assert_eq!(pads, held);
        for (index, medium) in media.iter().enumerate() {
            let (Medium::Picture { grid } | Medium::Video { grid, .. }) = medium;
            let mine = got.spans.iter().filter(|span| span.medium == index);
            let rows: Vec<usize> = mine.flat_map(|span| span.row..span.row + span.rows()).collect();
            prop_assert_eq!(rows, (0..grid.rows(2)).collect::<Vec<_>>());
        }
    }

    /// A walk that stops between spans and goes on is the walk of the whole.
    #[test]
    fn a_walk_in_parts_is_the_whole((ids, media) in prompts(), at in any::<prop::sample::Index>()) {
        let got = expanded(&ids, &media).unwrap();
        let length = got.ids.len();
        let whole = three_axis(Start::default(), length, &got.spans).unwrap();
        let mut cut = at.index(length + 1);
        if let Some(span) = got.spans.iter().find(|span| (span.first..span.first + span.rows()).contains(&cut)) {
            cut = span.first;
        }
        let (before, behind): (Vec<Span>, Vec<Span>) = got.spans.iter().partition(|span| span.first < cut);
        let first = three_axis(Start::default(), cut, &before).unwrap();
        let second = three_axis(first.end, length - cut, &behind).unwrap();
        prop_assert_eq!([first.tokens, second.tokens].concat(), whole.tokens.clone());
        prop_assert_eq!(second.end, whole.end);
        // One more token stands behind all others.
        let most = whole.tokens.iter().map(|p| p.time.max(p.row).max(p.column)).max().unwrap();
        prop_assert_eq!(whole.offset(), most + 1 - length as i32);
    }
}
