//! The picture of the demo: two shapes, drawn here, and shown with half blocks.

use vision::Picture;

/// What the demo model is asked about it.
pub(super) const QUESTION: &str = "Describe the picture.";

const WIDTH: u32 = 320;
const HEIGHT: u32 = 240;
const WHITE: [u8; 3] = [255; 3];
/// Columns of characters that it is shown in; a character is as high as two of its pixels.
const COLUMNS: u32 = 40;

/// A red circle on the left and a blue square on the right, on white.
pub(super) fn drawn() -> Picture {
    let colour = |x: u32, y: u32| {
        let from = |centre: [i64; 2]| [i64::from(x) - centre[0], i64::from(y) - centre[1]];
        let [x, y] = from([64, 120]);
        if x * x + y * y < 38 * 38 {
            return [255, 0, 0];
        }
        let [x, y] = from([256, 120]);
        if x.abs().max(y.abs()) < 32 { [0, 0, 255] } else { WHITE }
    };
    let rgb = (0..HEIGHT).flat_map(|y| (0..WIDTH).flat_map(move |x| colour(x, y))).collect();
    Picture::new(WIDTH, HEIGHT, rgb).expect("every pixel has three bytes")
}

/// The picture in lines of half blocks: in its colours where there is a terminal, else what is not white.
pub(super) fn lines(picture: &Picture, coloured: bool) -> Vec<String> {
    let step = picture.width() / COLUMNS;
    let pixel = |column: u32, row: u32| {
        let [x, y] = [column, row].map(|at| at * step + step / 2);
        let at = 3 * (y * picture.width() + x) as usize;
        [picture.rgb()[at], picture.rgb()[at + 1], picture.rgb()[at + 2]]
    };
    let rows = picture.height() / step / 2;
    let line = |row: u32| {
        let pairs = (0..COLUMNS).map(|column| [2 * row, 2 * row + 1].map(|row| pixel(column, row)));
        if coloured {
            let block = |[[r, g, b], [lr, lg, lb]]: [[u8; 3]; 2]| {
                format!("\x1b[38;2;{r};{g};{b};48;2;{lr};{lg};{lb}m▀")
            };
            return pairs.map(block).chain(["\x1b[0m".into()]).collect();
        }
        let block = |pair: [[u8; 3]; 2]| match pair.map(|pixel| pixel == WHITE) {
            [true, true] => ' ',
            [false, true] => '▀',
            [true, false] => '▄',
            [false, false] => '█',
        };
        pairs.map(block).collect::<String>().trim_end().to_owned()
    };
    (0..rows).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_shapes_are_shown() {
        let lines = lines(&drawn(), false);
        assert_eq!(lines.len(), 15);
        let middle: Vec<&str> = lines[7].split_whitespace().collect();
        assert_eq!(middle.len(), 2, "{lines:#?}");
        assert!(middle[0].chars().count() >= 8 && middle[1].chars().count() == 8, "{lines:#?}");
        assert_eq!((lines[0].as_str(), lines[14].as_str()), ("", ""));
    }

    #[test]
    fn a_terminal_gets_the_colours() {
        let lines = super::lines(&drawn(), true);
        assert!(lines[7].contains("38;2;255;0;0") && lines[7].contains("48;2;0;0;255"), "{}", lines[7]);
        assert!(lines.iter().all(|line| line.ends_with("\x1b[0m") && line.matches('▀').count() == 40));
    }
}
