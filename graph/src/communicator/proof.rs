//! The test of all collectives with which a communicator for CUDA devices begins: each is launched, and replayed from
//! a graph, in sizes that take every way through NCCL and through the exchange kernel.

use super::Communicator;
use crate::arena::Arena;
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::recording::Recording;
use crate::stream::Stream;

/// How often each collective is launched, and how often a graph of all sizes is replayed.
const RUNS: usize = 100;
/// Words of each part. NCCL's protocols differ by size, and each is to have run before the first capture. A pushed
/// gather takes one block, the same by bytes, two blocks, then 20, all of them, and all of them twice.
const WORDS: [usize; 6] = [1, 3, 640, 10_240, 81_920, 262_144];

/// What is tested.
#[derive(Clone, Copy)]
pub(super) enum What {
    Gathers,
    /// Each rank sends its part to the other.
    Passes,
}

/// Both ranks' parts of some sizes, one size after another from the start of the data on.
struct Parts<'a>(&'a [usize]);

impl Parts<'_> {
    /// All words if what is at (rank, index) of a part is `word`.
    fn words(&self, word: impl Fn(usize, usize) -> f32) -> Vec<f32> {
        let mut all = Vec::with_capacity(2 * self.0.iter().sum::<usize>());
        for &words in self.0 {
            for rank in [0, 1] {
                all.extend((0..words).map(|index| word(rank, index)));
            }
        }
        all
    }

    fn emission(&self, end: &Communicator, data: &Arena, what: What) -> Result<Emission> {
        let (mut emission, mut at) = (Emission::new(), data.base());
        for bytes in self.0.iter().map(|words| 4 * words) {
            match what {
                What::Gathers => emission.gather(end, at, bytes)?,
                What::Passes => {
                    for sender in [0, 1] {
                        let part = at.byte_add(sender * bytes);
                        match end.rank() == sender {
                            true => emission.send(end, part, bytes)?,
                            false => emission.receive(end, part, bytes)?,
                        }
                    }
                }
            }
            at = at.byte_add(2 * bytes);
        }
        Ok(emission)
    }
}

/// Word `index` that `rank` brings to a run.
fn word(run: usize, rank: usize, index: usize) -> f32 {
    (2 * index + rank + 31 * run) as f32 * 0.5 - 3.0
}

/// Runs all collectives of one kind, and looks at what came.
pub(super) fn run(end: &Communicator, stream: &Stream, what: What) -> Result<()> {
    let bytes = 8 * WORDS.iter().sum::<usize>();
    let data = stream.device().arena("test of collectives", bytes)?;
    for run in 0..RUNS {
        let parts = Parts(&WORDS[run % WORDS.len()..][..1]);
        let emission = parts.emission(end, &data, what)?;
        check(end, &data, stream, run, &parts, || stream.run(emission, std::slice::from_ref(&data)))?;
    }
    let (parts, graph) = (Parts(&WORDS), capture(end, &data, stream, what)?);
    (RUNS..2 * RUNS).try_for_each(|run| check(end, &data, stream, run, &parts, || stream.replay(&graph)))
}

fn capture(end: &Communicator, data: &Arena, stream: &Stream, what: What) -> Result<Exec> {
    let recording = Recording::begin(stream, "test of collectives")?;
    stream.run(Parts(&WORDS).emission(end, data, what)?, std::slice::from_ref(data))?;
    recording.finish(vec![])
}

/// Fills this rank's parts, does the work, and compares all parts.
fn check(
    end: &Communicator,
    data: &Arena,
    stream: &Stream,
    run: usize,
    parts: &Parts<'_>,
    work: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let (own, base) = (end.rank(), data.base().cast::<f32>());
    let before = parts.words(|rank, index| if rank == own { word(run, rank, index) } else { f32::NAN });
    data.write(base, &before)?;
    work()?;
    stream.synchronize()?;
    let expected = parts.words(|rank, index| word(run, rank, index));
    let found: Vec<f32> = data.read(base, expected.len())?;
    let differs =
        found.iter().zip(&expected).position(|(found, expected)| found.to_bits() != expected.to_bits());
    match differs {
        None => Ok(()),
        Some(at) => Err(Error::Communicator {
            doing: format!("exchange parts of {:?} words in run {run} of the test", parts.0),
            why: format!("word {at} is {} and not {}", found[at], expected[at]),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_test_are_exact_and_differ() {
        let most = word(2 * RUNS, 1, WORDS[WORDS.len() - 1]);
        assert!(most < (1 << 23) as f32 && word(0, 0, 1) != word(0, 1, 0) && word(0, 0, 5) == -3.0 + 5.0);
    }

    #[test]
    fn parts_lie_in_the_order_of_sizes_then_ranks() {
        let words = Parts(&[1, 3]).words(|rank, index| (10 * rank + index) as f32);
        assert_eq!(words, [0.0, 10.0, 0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
    }

    #[test]
    fn sizes_reach_the_largest_that_is_pushed() {
        assert_eq!(WORDS.iter().max(), Some(&(crate::cuda::MOST_BYTES / 4)));
    }
}
