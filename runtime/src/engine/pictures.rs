//! What the engine does for pictures: it has them encoded between rounds, shares their features with the other rank, and
//! says which rows of a round take them.

use std::collections::HashMap;
use std::sync::Arc;

use graph::{Arena, Communicator, Emission, Ptr};
use planner::{RequestId, Round};
use vision::ContentKey;

use super::eyes::{Eyes, Next, Ready};
use super::lockstep::agreed;
use super::media::{self, Features, Shown};
use super::{Engine, Event};
use crate::error::Error;
use crate::model::PictureRows;
use crate::request::{Media, Submission};

impl Engine {
    /// What the pictures of a request mean for its rows; nothing if it has none.
    pub(super) fn shown(&self, submission: &Submission) -> Result<Option<Shown>, Error> {
        let (sees, has) = (self.sees.as_ref(), self.runner.model.config.vision.as_ref());
        let most = self.eyes.as_ref().map(Eyes::most);
        let mut shown = Shown::of(&submission.prompt, &submission.media, sees, has, most)?;
        if let (Some(shown), Some(fault)) = (&mut shown, self.options.picture_fault) {
            shown.plant(fault);
        }
        Ok(shown)
    }

    /// Queues what fits between two rounds of what pictures need, and hands requests whose pictures are encoded to the
    /// planner. Whether anything was done.
    pub(super) fn see(&mut self) -> Result<bool, Error> {
        let Some(mut left) = self.eyes.as_ref().map(Eyes::stride) else { return Ok(false) };
        let mut seen = false;
        loop {
            let Some(eyes) = &mut self.eyes else { return Ok(seen) };
            match eyes.next(&self.runner.device, &self.runner.stream, left)? {
                Next::Idle | Next::Full => return Ok(seen),
                Next::Queued(rows) => left -= rows,
                Next::Ready(ready) => self.send(ready)?,
                Next::Lacks(id, why) => self.end(id, Event::Failed(why)),
            }
            seen = true;
        }
    }

    /// Hands a request whose pictures are encoded to the planner, and all of it to the other rank.
    fn send(&mut self, ready: Ready) -> Result<(), Error> {
        let Ready { id, features, submission } = ready;
        let mut sent = Vec::new();
        if let Some(submission) = &submission {
            self.command(|peer| peer.submit(id, submission))?;
            for media in
                media::distinct(&submission.media).filter(|media| self.attached(&media.key).is_none())
            {
                let at = submission.media.iter().position(|other| other.key == media.key);
                sent.push(features[at.expect("one of them")].clone());
            }
        }
        if submission.is_some() && !self.has_room(id, true)? {
            return Ok(());
        }
        self.exchange(&sent, Emission::send)?;
        if let Some(live) = self.live.get_mut(&id) {
            live.features(features);
        }
        self.arrive(id, None)
    }

    /// Takes the features of a request from the rank that encoded them.
    pub(super) fn attach(&mut self, id: RequestId, media: &[Media]) -> Result<(), Error> {
        let Some(tower) = &self.sees else { return Ok(()) };
        let (mut all, mut come, mut here) = (HashMap::new(), Vec::new(), true);
        for media in media::distinct(media) {
            if let Some(features) = self.attached(&media.key) {
                all.insert(media.key, features.clone());
                continue;
            }
            let rows = media::rows_of(media, tower);
            match self.runner.device.arena("picture features", rows * self.row_bytes()) {
                Ok(arena) => {
                    let features = Arc::new(Features { arena, rows });
                    come.push(features.clone());
                    all.insert(media.key, features);
                }
                Err(graph::Error::OutOfMemory { .. }) => here = false,
                Err(error) => return Err(error.into()),
            }
        }
        if !self.has_room(id, here)? {
            return Ok(());
        }
        self.exchange(&come, Emission::receive)?;
        if let Some(live) = self.live.get_mut(&id) {
            live.features(media.iter().map(|media| all[&media.key].clone()).collect());
        }
        self.arrive(id, None)
    }

    /// The features of a picture that a request in the planner needs: both ranks have the same, since requests come
    /// and prompts end in the same order on both.
    fn attached(&self, key: &ContentKey) -> Option<&Arc<Features>> {
        self.live.values().find_map(|live| live.shown.as_ref()?.features_of(key))
    }

    /// Whether every rank has room for the features of a request; it ends if one has not.
    fn has_room(&mut self, id: RequestId, here: bool) -> Result<bool, Error> {
        let what = "room for the features of a picture";
        let there = agreed(&mut self.peer, &self.runner.stream, what)(here)?;
        if !there {
            let why = "one of the ranks has no memory for the features of a picture; try again later, or start with a \
                       smaller --memory";
            self.end(id, Event::Failed(why.into()));
        }
        Ok(there)
    }

    /// Sends features to the other rank, or receives them, in order with rounds.
    fn exchange(&self, features: &[Arc<Features>], way: Way) -> Result<(), Error> {
        let communicator = self.runner.model.communicator.as_ref().filter(|_| !features.is_empty());
        let Some(communicator) = communicator else { return Ok(()) };
        let mut emission = Emission::new();
        for Features { arena, rows } in features.iter().map(|features| &**features) {
            way(&mut emission, communicator, arena.base(), rows * self.row_bytes())?;
        }
        let rooms: Vec<_> = features.iter().map(|features| features.arena.clone()).collect();
        Ok(self.runner.stream.run(emission, &rooms)?)
    }

    /// Bytes of a row of features.
    fn row_bytes(&self) -> usize {
        self.runner.model.config.hidden_size * self.runner.model.element.bytes()
    }

    /// Which rows of a round take features, and the memory that these lie in.
    pub(super) fn pictures(&self, round: &Round) -> (Vec<PictureRows>, Vec<Arena>) {
        let planner::Kind::Prompt { .. } = round.kind else { return Default::default() };
        let lane = &round.lanes[0];
        let request = self.state.lane(lane.slot).map(|lane| lane.request().id);
        let shown = request.and_then(|id| self.live.get(&id)?.shown.as_ref());
        let piece = lane.before as usize..lane.after as usize;
        shown.map_or_else(Default::default, |shown| shown.rows(piece, self.row_bytes()))
    }

    /// Lets go of the features of a prompt that is through.
    pub(super) fn prompted(&mut self, round: &Round) {
        for rows in &round.lanes {
            let request = self.state.lane(rows.slot).map(|lane| lane.request().id);
            if let Some(live) = request.and_then(|id| self.live.get_mut(&id)) {
                live.features(Vec::new());
            }
        }
    }
}

/// Which way features go between ranks.
type Way = fn(&mut Emission, &Communicator, Ptr<u8>, usize) -> graph::Result<()>;

/// Encodes a picture, and gives its features to the other rank.
pub(super) fn first_picture(engine: &mut Engine) -> Result<Arena, Error> {
    let arena = engine.runner.device.arena("first picture", engine.row_bytes())?;
    let stream = &engine.runner.stream;
    let way: Way = match (&mut engine.eyes, &engine.sees) {
        (Some(eyes), Some(config)) => {
            eyes.warm(&arena, config.spatial_merge_size as u32, stream)?;
            Emission::send
        }
        _ => Emission::receive,
    };
    engine.exchange(&[Arc::new(Features { arena: arena.clone(), rows: 1 })], way)?;
    Ok(arena)
}
