//! Rotary positions on three axes, interleaved: which frequency turns with which axis, and the rotation.

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Ptr, host::Access};

use crate::numerics::Element;

/// The rotary table of a model: `half` frequencies, each tied to an axis.
///
/// ```text
/// axis(i) = height if i % 3 == 1 and i < 3 * sections[1], width if i % 3 == 2 and i < 3 * sections[2], else time
/// angle i = position on axis(i) as f32 * frequency[i]
/// a, b = v[i], v[i + half];  v'[i] = r16(a * cos - b * sin);  v'[i + half] = r16(b * cos + a * sin)
/// ```
/// with cos and sin rounded by r16. Elements from `2 * half` on do not turn.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Rotary {
    /// `half` inverse frequencies, f32.
    pub frequencies: Ptr<f32>,
    /// Half the rotary width.
    pub half: u32,
    /// `sections[1]` and `sections[2]` of the config: how many frequencies turn with height and width.
    pub height: u32,
    /// See `height`.
    pub width: u32,
    /// Not used; zero.
    pub zero: u32,
}

impl Rotary {
    /// The frequencies, read from memory.
    pub fn frequencies<'a>(&self, memory: &'a Access<'_>) -> Result<&'a [f32], Fault> {
        memory.read(self.frequencies, self.half as usize)
    }

    /// The axis (0 time, 1 height, 2 width) that frequency `i` turns with.
    pub fn axis(&self, i: usize) -> usize {
        match i % 3 {
            1 if i < 3 * self.height as usize => 1,
            2 if i < 3 * self.width as usize => 2,
            _ => 0,
        }
    }

    /// Cosines and sines at a position, rounded to `E`; `half` of each.
    pub fn turn<E: Element>(&self, frequencies: &[f32], axes: [i32; 3]) -> Turn {
        let angles = frequencies.iter().enumerate().map(|(i, f)| axes[self.axis(i)] as f32 * f);
        Turn { pairs: angles.map(|angle| (E::round(angle.cos()), E::round(angle.sin()))).collect() }
    }
}

/// `(inverse) frequencies` of a rotary table: `1 / theta^(2 i / width)` for `i` in `0..width / 2`.
pub fn frequencies(theta: f32, width: usize) -> Vec<f32> {
    (0..width / 2).map(|i| 1.0 / theta.powf((2 * i) as f32 / width as f32)).collect()
}

/// The rotation at one position.
pub struct Turn {
    pairs: Vec<(f32, f32)>,
}

impl Turn {
    /// Rotates the first elements of `head` in place.
    pub fn apply<E: Element>(&self, head: &mut [E]) {
        let half = self.pairs.len();
        for (i, (cos, sin)) in self.pairs.iter().enumerate() {
            let (a, b) = (head[i].widen(), head[i + half].widen());
            head[i] = E::narrow(a * cos - b * sin);
            head[i + half] = E::narrow(b * cos + a * sin);
        }
    }
}
