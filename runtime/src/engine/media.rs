//! The pictures and clips of a request: whether they fit its prompt, where each position stands, and which rows of a
//! piece take which features.

use std::collections::HashSet;
use std::sync::Arc;

use graph::{Arena, Ptr};
use kernels::numerics::ElementType;
use vision::{ContentKey, Positions, Span, Start, three_axis};

use crate::config::VisionConfig;
use crate::error::Error;
use crate::model::PictureRows;
use crate::request::Media;
use crate::tower::{TowerLimits, patch_bytes};

/// The features of a picture or a clip, in memory of their own.
#[derive(Debug)]
pub(crate) struct Features {
    /// `[rows, hidden]` elements.
    pub(crate) arena: Arena,
    /// How many rows.
    pub(crate) rows: usize,
}

/// What the pictures of a request mean for its rows.
pub(crate) struct Shown {
    /// The rotary position of every id of the prompt.
    axes: Vec<[i32; 3]>,
    /// What is added to the sequence positions of its decode rows.
    pub(crate) offset: i32,
    /// Where pictures and pairs of frames stand, ascending.
    spans: Vec<Span>,
    /// What each picture or clip is.
    keys: Vec<ContentKey>,
    /// The features of each: none before they are made, and once the prompt is through.
    pub(crate) features: Vec<Arc<Features>>,
}

/// A fault to plant.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureFault {
    /// Decode rows stand where text would.
    NoOffset,
    /// Prompt rows do.
    TextAxes,
    /// Each placeholder takes the row of the one before.
    ShiftedRows,
}

/// The most that a request may bring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Most {
    /// Patches of a picture or a clip.
    pub(super) patches: usize,
    /// Bytes of the features of all that differ.
    pub(crate) features: usize,
    /// Bytes of the pixels of a patch.
    pub(super) patch_bytes: usize,
    /// Bytes of a row of features.
    pub(crate) row_bytes: usize,
}

impl Most {
    /// The most of a tower whose features have so many bytes.
    pub(crate) fn of(
        config: &VisionConfig,
        limits: TowerLimits,
        element: ElementType,
        features: usize,
    ) -> Most {
        Most {
            patches: limits.whole_squares(config).patches,
            features,
            patch_bytes: patch_bytes(config),
            row_bytes: config.out_hidden_size * element.bytes(),
        }
    }
}

impl Shown {
    /// Checks the pictures of a request against its prompt, and says what they mean for its rows; nothing if it has none.
    /// `sees` is the tower if pictures are taken, `has` that of the model. `most` is what the rank that encodes them takes;
    /// the other one sees no pixels.
    ///
    /// # Errors
    /// What does not fit: which picture, and the number that decided; pictures are not taken.
    pub(crate) fn of(
        prompt: &[u32],
        media: &[Media],
        sees: Option<&VisionConfig>,
        has: Option<&VisionConfig>,
        most: Option<Most>,
    ) -> Result<Option<Shown>, Error> {
        match (sees, media.is_empty()) {
            // Whoever takes no pictures takes no placeholders for text either.
            (_, true) => sees.or(has).map_or(Ok(()), |tower| covered(prompt, &[], tower)).map(|()| None),
            (Some(tower), false) => Shown::new(prompt, media, tower, most).map(Some),
            (None, false) => Err(Error::Prompt(format!(
                "the request brings {} pictures, and this engine takes none; use a model with a vision tower, and leave \
                 out --vision off",
                media.len()
            ))),
        }
    }

    fn new(
        prompt: &[u32],
        media: &[Media],
        tower: &VisionConfig,
        most: Option<Most>,
    ) -> Result<Shown, Error> {
        let mut spans = Vec::new();
        for (number, one) in media.iter().enumerate() {
            check(number, one, prompt, tower, most)
                .map_err(|why| Error::Prompt(format!("picture {number}: {why}")))?;
            spans.extend_from_slice(&one.spans);
        }
        let walk = three_axis(Start::default(), prompt.len(), &spans)
            .map_err(|error| Error::Prompt(error.to_string()))?;
        covered(prompt, &spans, tower)?;
        if let Some(most) = most {
            let bytes = distinct(media)
                .map(|one| rows_of(one, tower).saturating_mul(most.row_bytes))
                .fold(0, usize::saturating_add);
            if bytes > most.features {
                return Err(Error::Prompt(format!(
                    "the features of {} pictures take {bytes} bytes, and all pictures together have {}; send fewer or \
                     smaller ones, or give them more (--feature-memory)",
                    media.len(),
                    most.features
                )));
            }
        }
        let keys = media.iter().map(|one| one.key).collect();
        Ok(Shown { keys, ..Shown::at(walk, spans) })
    }

    /// The position behind the last row of a picture.
    pub(crate) fn end(&self) -> usize {
        self.spans.last().map_or(0, |span| span.first + span.rows())
    }

    /// The features of a picture, if they are here and needed.
    pub(super) fn features_of(&self, key: &ContentKey) -> Option<&Arc<Features>> {
        self.keys.iter().zip(&self.features).find(|(own, _)| *own == key).map(|(_, features)| features)
    }

    fn at(walk: Positions, spans: Vec<Span>) -> Shown {
        let offset = walk.offset();
        let axes = walk.tokens.into_iter().map(|position| position.axes()).collect();
        Shown { axes, offset, spans, keys: Vec::new(), features: Vec::new() }
    }

    /// Plants a fault.
    pub(super) fn plant(&mut self, fault: PictureFault) {
        match fault {
            PictureFault::NoOffset => self.offset = 0,
            PictureFault::TextAxes => (0..).zip(&mut self.axes).for_each(|(at, axes)| *axes = [at; 3]),
            PictureFault::ShiftedRows => self.spans.iter_mut().for_each(|span| span.first += 1),
        }
    }

    /// The rotary position of an id of the prompt.
    pub(crate) fn axes(&self, position: usize) -> [i32; 3] {
        self.axes[position]
    }

    /// Which rows of a piece take features, and the memory that these lie in. A piece may begin and end inside a picture.
    pub(crate) fn rows(
        &self,
        piece: std::ops::Range<usize>,
        row_bytes: usize,
    ) -> (Vec<PictureRows>, Vec<Arena>) {
        let (mut rows, mut rooms): (_, Vec<Arena>) = (Vec::new(), Vec::new());
        for span in &self.spans {
            let (first, end) = (span.first.max(piece.start), (span.first + span.rows()).min(piece.end));
            if first < end {
                let arena = &self.features[span.medium].arena;
                let features: Ptr<u8> = arena.base().byte_add((span.row + first - span.first) * row_bytes);
                rows.push(PictureRows { row: first - piece.start, rows: end - first, features });
                rooms.push(arena.clone());
            }
        }
        (rows, rooms)
    }
}

/// Rows of a picture or a clip.
pub(super) fn rows_of(media: &Media, tower: &VisionConfig) -> usize {
    media.patches.grid.rows(tower.spatial_merge_size as u32)
}

/// The first of each that are equal.
pub(crate) fn distinct(media: &[Media]) -> impl Iterator<Item = &Media> {
    let mut seen: HashSet<ContentKey> = HashSet::new();
    media.iter().filter(move |media| seen.insert(media.key))
}

/// That every placeholder of a prompt belongs to one of these spans, which ascend and hold nothing else.
fn covered(prompt: &[u32], spans: &[Span], tower: &VisionConfig) -> Result<(), Error> {
    let mut at = 0;
    let ends = spans.iter().map(|span| (span.first, span.first + span.rows()));
    for (first, next) in ends.chain([(prompt.len(), prompt.len())]) {
        let placeholder = |id: &u32| [tower.tokens.image, tower.tokens.video].contains(id);
        if let Some(stray) = prompt[at..first].iter().position(placeholder) {
            return Err(Error::Prompt(format!(
                "id {} at position {} stands for a row of a picture, and the request brings none for it",
                prompt[at + stray],
                at + stray
            )));
        }
        at = next;
    }
    Ok(())
}

/// Checks one picture or clip.
fn check(
    number: usize,
    media: &Media,
    prompt: &[u32],
    tower: &VisionConfig,
    most: Option<Most>,
) -> Result<(), String> {
    let (grid, merge) = (media.patches.grid, tower.spatial_merge_size as u32);
    let sizes = [grid.pairs, grid.height, grid.width].map(|size| size as usize);
    let patches = sizes.into_iter().try_fold(1usize, usize::checked_mul).filter(|patches| *patches > 0);
    let patches = patches.ok_or_else(|| {
        format!("{} x {} x {} is no number of patches", grid.pairs, grid.height, grid.width)
    })?;
    if let Some(most) = most {
        if patches > most.patches {
            return Err(format!(
                "{patches} patches, and the vision tower takes {}; make it smaller, or start with a larger --vision",
                most.patches
            ));
        }
        let (bytes, wanted) = (media.patches.bytes.len(), patches.saturating_mul(most.patch_bytes));
        if bytes != wanted {
            return Err(format!("{bytes} bytes for {patches} patches, which have {wanted}"));
        }
    }
    if !grid.height.is_multiple_of(merge) || !grid.width.is_multiple_of(merge) {
        return Err(format!("{} x {} patches are not squares of {merge} x {merge}", grid.height, grid.width));
    }
    if media.spans.len() != grid.pairs as usize {
        return Err(format!("{} spans for {} pairs of frames", media.spans.len(), grid.pairs));
    }
    let mut kind = None;
    for (pair, span) in media.spans.iter().enumerate() {
        let rows = Span {
            medium: number,
            row: pair * span.rows(),
            first: span.first,
            height: grid.height / merge,
            width: grid.width / merge,
        };
        if *span != rows {
            return Err(format!("span {pair} is {span:?}, and its rows are those of {rows:?}"));
        }
        let ids = span.first.checked_add(span.rows()).and_then(|end| prompt.get(span.first..end));
        let ids = ids.ok_or_else(|| {
            let (first, rows, ids) = (span.first, span.rows(), prompt.len());
            format!("{rows} rows from position {first} on do not lie in a prompt of {ids} ids")
        })?;
        let kind = *kind.get_or_insert(ids[0]);
        let clip = kind == tower.tokens.video;
        if !clip && (kind != tower.tokens.image || grid.pairs != 1) {
            return Err(format!(
                "id {kind} at position {} is not what stands for {}",
                span.first,
                if grid.pairs == 1 { "a picture or a clip" } else { "a clip" }
            ));
        }
        if let Some(at) = ids.iter().position(|id| *id != kind) {
            return Err(format!(
                "id {} at position {} is not {kind}, which stands for its rows",
                ids[at],
                span.first + at
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture of 2 x 3 rows at position 3 and one of 1 x 1 at 10, in a prompt of 12 ids.
    fn shown() -> (Shown, [Ptr<u8>; 2]) {
        let device = graph::Device::host(Default::default());
        let span = |medium, first, height, width| Span { medium, row: 0, first, height, width };
        let spans = vec![span(0, 3, 2, 3), span(1, 10, 1, 1)];
        let walk = three_axis(Start::default(), 12, &spans).expect("they fit");
        let features = |rows: usize| {
            let arena = device.arena("features", rows * 8).expect("memory");
            Arc::new(Features { arena, rows })
        };
        let features = vec![features(6), features(1)];
        let bases = [0, 1].map(|medium: usize| features[medium].arena.base());
        (Shown { features, ..Shown::at(walk, spans) }, bases)
    }

    #[test]
    fn every_cut_gives_each_placeholder_its_own_row() {
        let (shown, bases) = shown();
        // What each position takes, were every piece one row long.
        let alone: Vec<Option<Ptr<u8>>> =
            (0..12).map(|at| shown.rows(at..at + 1, 8).0.first().map(|rows| rows.features)).collect();
        let mut expected = vec![None; 12];
        for row in 0..6 {
            expected[3 + row] = Some(bases[0].byte_add(8 * row));
        }
        expected[10] = Some(bases[1]);
        assert_eq!(alone, expected);
        for cut in 0..=12 {
            let mut got = vec![None; 12];
            for piece in [0..cut, cut..12] {
                let (rows, rooms) = shown.rows(piece.clone(), 8);
                assert_eq!(rows.len(), rooms.len());
                for rows in rows {
                    for row in 0..rows.rows {
                        got[piece.start + rows.row + row] = Some(rows.features.byte_add(8 * row));
                    }
                }
            }
            assert_eq!(got, expected, "cut at {cut}");
        }
    }

    #[test]
    fn positions_count_the_longer_side() {
        let (shown, _) = shown();
        assert_eq!(shown.axes(2), [2, 2, 2]);
        assert_eq!(shown.axes(7), [3, 4, 4]);
        assert_eq!(shown.axes(9), [6, 6, 6]);
        assert_eq!(shown.offset, -3);
    }
}
