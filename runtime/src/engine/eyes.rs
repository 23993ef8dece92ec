//! Where pictures become features: the tower between rounds, the features that are kept, and the requests that wait for
//! theirs.
//!
//! Requests whose pictures are not all encoded stand in a line of their own, first come first served, and enter the
//! planner's queue when the last of their pictures is. So requests without pictures that come later may go before
//! them, and none of the line overtakes another.
//!
//! Features lie in memory of their own, one arena for each picture, and are kept by content as long as the budget lasts.
//! What requests in the planner still need stays; the head of the line waits for it. It never waits in vain: a request
//! whose features would not fit the whole budget was refused when it came, those before it let go of theirs when their
//! prompts are through, and those behind it hold none.

use std::collections::VecDeque;
use std::sync::Arc;

use graph::{Arena, Device, Stream};
use planner::RequestId;
use vision::{CacheCounts, ContentKey, FeatureCache};

use super::media::{Features, Most};
use crate::error::Error;
use crate::request::{Media, Submission};
use crate::tower::{Encoding, Patches, Tower};

/// The tower with what it made and what it is to make.
pub(super) struct Eyes {
    tower: Tower,
    most: Most,
    kept: FeatureCache<Features>,
    line: VecDeque<Seeing>,
    /// The encoding of a picture of the line's head.
    work: Option<Work>,
}

/// A request whose pictures are not all encoded.
struct Seeing {
    id: RequestId,
    media: Vec<Media>,
    /// Those of its first pictures.
    features: Vec<Arc<Features>>,
    /// Whether the next one was looked for among those that are kept.
    missed: bool,
    /// What the other rank is to be told of it when they are all there.
    submission: Option<Submission>,
}

/// An encoding in progress.
struct Work {
    encoding: Encoding<Pixels>,
    key: ContentKey,
    features: Arc<Features>,
}

/// The pixels of a picture, shared with the request.
struct Pixels(Arc<vision::Patches>);

impl AsRef<[u8]> for Pixels {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// What came of looking.
pub(super) enum Next {
    /// Nothing is left to do, or the head of the line waits for memory.
    Idle,
    /// The next step has more patches than were left.
    Full,
    /// A step with so many patches was queued.
    Queued(usize),
    /// All pictures of a request are encoded, as soon as the stream has come this far.
    Ready(Ready),
    /// The device has no memory for a picture, and nobody will give any back.
    Lacks(RequestId, String),
}

/// A request whose pictures are encoded.
pub(super) struct Ready {
    pub(super) id: RequestId,
    /// One for each picture or clip, in order.
    pub(super) features: Vec<Arc<Features>>,
    pub(super) submission: Option<Submission>,
}

impl Eyes {
    /// Eyes that keep features of up to `most.features` bytes.
    pub(super) fn new(tower: Tower, most: Most) -> Eyes {
        Eyes { tower, most, kept: FeatureCache::new(most.features), line: VecDeque::new(), work: None }
    }

    /// The most that a request may bring.
    pub(super) fn most(&self) -> Most {
        self.most
    }

    /// Patches that steps between two rounds may take together: those of one piece, which is as many as a step takes.
    pub(super) fn stride(&self) -> usize {
        self.tower.limits.piece
    }

    /// Takes a request into the line.
    pub(super) fn line_up(&mut self, id: RequestId, media: Vec<Media>, submission: Option<Submission>) {
        self.line.push_back(Seeing { id, media, features: Vec::new(), missed: false, submission });
    }

    /// Takes a request out of the line; whether it was there.
    pub(super) fn cancel(&mut self, id: RequestId) -> bool {
        let Some(at) = self.line.iter().position(|seeing| seeing.id == id) else { return false };
        if at == 0 {
            self.work = None;
        }
        self.line.remove(at);
        true
    }

    /// Forgets the line.
    pub(super) fn clear(&mut self) {
        (self.work, self.line) = (None, VecDeque::new());
    }

    /// Requests in the line.
    pub(super) fn waiting(&self) -> usize {
        self.line.len()
    }

    /// Lets go of all features that nobody needs.
    pub(super) fn forget(&mut self) {
        while self.kept.evict() {}
    }

    /// What was kept, and found again.
    pub(super) fn counts(&self) -> CacheCounts {
        self.kept.counts()
    }

    /// Queues the next step of what the head of the line needs, if it takes no more than `left` patches, or says how far
    /// it is.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn next(&mut self, device: &Device, stream: &Stream, left: usize) -> Result<Next, Error> {
        loop {
            if let Some(work) = &mut self.work {
                let rows = work.encoding.next_step().map_or(0, |step| step.rows.len());
                if rows > left {
                    return Ok(Next::Full);
                }
                if self.tower.step(&mut work.encoding, stream)? {
                    return Ok(Next::Queued(rows));
                }
            }
            let Some(head) = self.line.front_mut() else { return Ok(Next::Idle) };
            if let Some(Work { key, features, .. }) = self.work.take() {
                let bytes = features.rows * self.most.row_bytes;
                self.kept.insert(key, features.clone(), bytes);
                head.features.push(features);
                head.missed = false;
            }
            let Some(media) = head.media.get(head.features.len()) else {
                let Seeing { id, features, submission, .. } = self.line.pop_front().expect("it has a head");
                return Ok(Next::Ready(Ready { id, features, submission }));
            };
            let Media { patches, key, .. } = media;
            let grid = [patches.grid.pairs, patches.grid.height, patches.grid.width];
            let rows = self.tower.tokens(grid);
            if !head.missed {
                if let Some(found) = self.kept.get(key).filter(|found| found.rows == rows) {
                    head.features.push(found);
                    continue;
                }
                head.missed = true;
            }
            let bytes = rows * self.most.row_bytes;
            if !self.kept.make_room(bytes) {
                return Ok(Next::Idle);
            }
            let arena = match room(device, bytes, &mut self.kept)? {
                Ok(arena) => arena,
                Err(why) => {
                    let own: usize = distinct_bytes(&head.features, self.most.row_bytes);
                    if self.kept.held() > own {
                        // Somebody lets go of some, and it is tried again.
                        return Ok(Next::Idle);
                    }
                    let Seeing { id, .. } = self.line.pop_front().expect("it has a head");
                    return Ok(Next::Lacks(id, why));
                }
            };
            let items = vec![Patches { bytes: Pixels(patches.clone()), grid }];
            let (key, features) = (*key, Arc::new(Features { arena, rows }));
            let encoding = self.tower.begin(items, &features.arena, features.arena.base())?;
            self.work = Some(Work { encoding, key, features });
        }
    }

    /// Encodes the smallest picture there is into `room`, so that nothing is done for the first time later.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn warm(&mut self, room: &Arena, merge: u32, stream: &Stream) -> Result<(), Error> {
        let pixels = vec![0u8; (merge * merge) as usize * self.most.patch_bytes];
        let items = vec![Patches { bytes: pixels, grid: [1, merge, merge] }];
        let mut encoding = self.tower.begin(items, room, room.base())?;
        while self.tower.step(&mut encoding, stream)? {}
        Ok(())
    }
}

/// Memory for features; what is kept and not needed makes room for it. Says why, if there is none.
fn room(
    device: &Device,
    bytes: usize,
    kept: &mut FeatureCache<Features>,
) -> Result<Result<Arena, String>, Error> {
    loop {
        match device.arena("picture features", bytes) {
            Ok(arena) => return Ok(Ok(arena)),
            Err(graph::Error::OutOfMemory { .. }) if kept.evict() => {}
            Err(error @ graph::Error::OutOfMemory { .. }) => return Ok(Err(error.to_string())),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Bytes of features, each counted once.
fn distinct_bytes(features: &[Arc<Features>], row_bytes: usize) -> usize {
    let first = |at: usize| !features[..at].iter().any(|other| Arc::ptr_eq(other, &features[at]));
    (0..features.len()).filter(|at| first(*at)).map(|at| features[at].rows * row_bytes).sum()
}
