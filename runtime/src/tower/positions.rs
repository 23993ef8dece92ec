//! Rotary positions of prompts with pictures: three axes for every id, and what decode rows add.

/// The placeholders of a picture, or of a pair of frames: ids in lines, each line after the one above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placeholders {
    /// The index of the first one in the prompt.
    pub first: usize,
    /// Lines.
    pub height: u32,
    /// Ids of a line.
    pub width: u32,
}

/// The rotary positions of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Positions {
    /// Time, height and width of every id.
    pub axes: Vec<[i32; 3]>,
    /// What is added to the sequence position of a decode row.
    pub offset: i32,
}

impl Placeholders {
    /// The placeholders of a grid of patches, as its items come: one for a picture, or one for each pair of frames,
    /// whose first ids are at `firsts`.
    pub fn of_grid(
        [frames, height, width]: [u32; 3],
        merge: u32,
        firsts: impl IntoIterator<Item = usize>,
    ) -> impl Iterator<Item = Placeholders> {
        let of = move |first| Placeholders { first, height: height / merge, width: width / merge };
        firsts.into_iter().take(frames as usize).map(of)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.height as usize * self.width as usize
    }
}

impl Positions {
    /// The positions of a prompt of `length` ids with these placeholders, in order: text counts on, and a picture counts
    /// as many as its longer side has.
    ///
    /// # Panics
    /// If placeholders overlap, or lie past the prompt.
    pub fn new(length: usize, pictures: &[Placeholders]) -> Positions {
        let (mut axes, mut next) = (Vec::with_capacity(length), 0);
        let text = |axes: &mut Vec<[i32; 3]>, next: &mut i32, end: usize| {
            assert!(axes.len() <= end, "placeholders at {end} overlap those before them");
            for _ in axes.len()..end {
                axes.push([*next; 3]);
                *next += 1;
            }
        };
        for picture in pictures {
            text(&mut axes, &mut next, picture.first);
            for line in 0..picture.height as i32 {
                axes.extend((0..picture.width as i32).map(|column| [next, next + line, next + column]));
            }
            next += picture.height.max(picture.width) as i32;
        }
        text(&mut axes, &mut next, length);
        Positions { axes, offset: next - length as i32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_counts_on_and_a_picture_counts_its_longer_side() {
        let pictures: Vec<Placeholders> = Placeholders::of_grid([1, 4, 6], 2, [3]).collect();
        let Positions { axes, offset } = Positions::new(11, &pictures);
        let axis = |which: usize| axes.iter().map(|axes| axes[which]).collect::<Vec<_>>();
        assert_eq!(axis(0), [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]);
        assert_eq!(axis(1), [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]);
        assert_eq!(axis(2), [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]);
        assert_eq!(offset, -3);
        assert_eq!(Positions::new(2, &[]), Positions { axes: vec![[0; 3], [1; 3]], offset: 0 });
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn placeholders_do_not_overlap() {
        let picture = Placeholders { first: 0, height: 2, width: 2 };
        Positions::new(8, &[picture, Placeholders { first: 3, ..picture }]);
    }
}
