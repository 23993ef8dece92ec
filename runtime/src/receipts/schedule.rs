//! Schedules of requests: made from a seed, played on an engine, shrunk when they fail.

use std::collections::BTreeMap;
use std::fmt;

use crossbeam_channel::{Receiver, unbounded};
use graph::Digester;
use planner::{ClassId, EagerReason, Kind, RequestId, Verdict};

use crate::engine::{Engine, Event, Ran, RoundCounts, Trace, Turn, reason_text};
use crate::error::Error;
use crate::request::{Media, Submission};
use crate::sampling::SamplingOptions;

/// Requests that arrive and leave.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// In the order of their arrival.
    pub requests: Vec<Planned>,
}

/// One request of a schedule.
#[derive(Clone, Debug)]
pub struct Planned {
    /// It arrives when so many rounds have been settled, or when nothing else is left to do.
    pub arrive: u32,
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// Most ids to make.
    pub max_tokens: u32,
    /// How ids are picked.
    pub sampling: SamplingOptions,
    /// It is called off when so many rounds have been settled.
    pub cancel: Option<u32>,
    /// Its cache class.
    pub class: ClassId,
    /// Its pictures and clips.
    pub media: Vec<Media>,
}

/// What a schedule did: one life per request.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    /// The lives of its requests.
    pub lives: Vec<Life>,
    /// How its rounds were executed.
    pub rounds: RoundCounts,
    /// The same of the rounds that each request had rows in; of one that was refused or failed, nothing.
    pub each: Vec<RoundCounts>,
    /// Replays whose decode round before was image-bearing: text lanes beside pictures.
    pub returns: u64,
}

/// What one request saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Life {
    /// Its ids.
    pub ids: Vec<u32>,
    /// What each round left: logits and state.
    pub traces: Vec<Trace>,
    /// How it ended.
    pub end: String,
}

/// A counter-based source of numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A source from a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 32) as u32 % end.max(1)
    }
}

impl Schedule {
    /// A schedule of up to `requests` requests, with prompts of up to `longest` ids below `vocab` and replies
    /// of up to `most` ids.
    pub fn random(random: &mut Random, vocab: u32, requests: u32, longest: u32, most: u32) -> Schedule {
        let count = 1 + random.below(requests);
        let request = |_| {
            // Often on or beside an edge of a page.
            let length = match random.below(3) {
                0 => (64 * (1 + random.below(longest / 64 + 1)) + random.below(3)).saturating_sub(1),
                _ => 1 + random.below(longest),
            };
            let sampling = match random.below(3) {
                0 => SamplingOptions::default(),
                1 => SamplingOptions {
                    temperature: 0.7,
                    top_k: random.below(40),
                    top_p: 0.9,
                    seed: Some(random.below(1000).into()),
                    ..SamplingOptions::default()
                },
                _ => SamplingOptions {
                    temperature: 1.2,
                    min_p: 0.02,
                    presence_penalty: 0.5,
                    frequency_penalty: 0.3,
                    repetition_penalty: 1.3,
                    logit_bias: vec![(random.below(vocab), 5.0), (random.below(vocab), -5.0)],
                    seed: Some(random.below(1000).into()),
                    logprobs: random.below(5),
                    ..SamplingOptions::default()
                },
            };
            let sampling = SamplingOptions { logit_bias: distinct(sampling.logit_bias), ..sampling };
            Planned {
                arrive: random.below(30),
                prompt: (0..length.clamp(1, longest)).map(|_| random.below(vocab)).collect(),
                max_tokens: 1 + random.below(most),
                sampling,
                cancel: (random.below(5) == 0).then(|| random.below(40)),
                class: ClassId(0),
                media: Vec::new(),
            }
        };
        let mut requests: Vec<Planned> = (0..count).map(request).collect();
        requests.sort_by_key(|planned| planned.arrive);
        Schedule { requests }
    }

    /// The smallest schedule found by leaving out requests, and shortening what is left, that still `fails`.
    pub fn shrink(&self, mut fails: impl FnMut(&Schedule) -> bool) -> Schedule {
        let mut smallest = self.clone();
        loop {
            let smaller = smallest.smaller().into_iter().find(|smaller| fails(smaller));
            match smaller {
                Some(smaller) => smallest = smaller,
                None => return smallest,
            }
        }
    }

    /// Schedules with a little less in them.
    fn smaller(&self) -> Vec<Schedule> {
        let mut all = Vec::new();
        let mut with = |index: usize, change: &dyn Fn(&mut Planned) -> bool| {
            let mut schedule = self.clone();
            if change(&mut schedule.requests[index]) {
                all.push(schedule);
            }
        };
        for index in 0..self.requests.len() {
            with(index, &|planned| planned.cancel.take().is_some());
            with(index, &|planned| {
                // A picture stands where it stands.
                let (length, pictures) = (planned.prompt.len(), planned.pictures_end());
                planned.prompt.truncate((pictures + (length - pictures) / 2).max(1));
                planned.prompt.len() < length
            });
            with(index, &Planned::leave_out_a_picture);
            with(index, &|planned| {
                let shorter = planned.max_tokens > 1;
                planned.max_tokens = (planned.max_tokens / 2).max(1);
                shorter
            });
            with(index, &|planned| std::mem::take(&mut planned.arrive) > 0);
            with(index, &|planned| std::mem::take(&mut planned.sampling) != SamplingOptions::default());
        }
        if self.requests.len() > 1 {
            for index in 0..self.requests.len() {
                let mut schedule = self.clone();
                schedule.requests.remove(index);
                all.insert(0, schedule);
            }
        }
        all
    }
}

/// The schedule as a planner scene: its arrivals, without ids and options, with room for all of them.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let classes = self.requests.iter().map(|planned| planned.class.0).max().unwrap_or(0) + 1;
        let lanes = self.requests.len().max(1);
        let pages = |planned: &Planned| (planned.prompt.len() + planned.max_tokens as usize).div_ceil(64);
        let pages = self.requests.iter().map(pages).sum::<usize>().max(1).to_string();
        writeln!(f, "limits pages={}", vec![pages; classes.into()].join(","))?;
        (0..classes).try_for_each(|class| writeln!(f, "slab slots={lanes} class={class}"))?;
        let mut now = 0;
        let mut moments: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for (index, planned) in self.requests.iter().enumerate() {
            let Planned { prompt, max_tokens, class, .. } = planned;
            let (prompt, class, seen) = (prompt.len(), class.0, planned.seen());
            let line = format!("arrive R{index} prompt={prompt} max={max_tokens} class={class}{seen}");
            moments.entry(planned.arrive).or_default().push(line);
            if let Some(cancel) = planned.cancel {
                moments.entry(cancel).or_default().push(format!("cancel R{index}"));
            }
        }
        for (moment, lines) in moments {
            if moment > now {
                writeln!(f, "run {}", moment - now)?;
                now = moment;
            }
            lines.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        }
        writeln!(f, "run all")
    }
}

/// Plays a schedule on an engine that is idle, until every request has ended.
///
/// # Errors
/// The device failed.
pub fn play(engine: &mut Engine, schedule: &Schedule) -> Result<Trail, Error> {
    let count = schedule.requests.len();
    let (lives, each) = (vec![Life::default(); count], vec![RoundCounts::default(); count]);
    let mut trail = Trail { lives, each, ..Trail::default() };
    let mut pictures = false;
    let mut inboxes: Vec<Option<Receiver<Event>>> = vec![None; schedule.requests.len()];
    let id = |index: usize| RequestId(index as u64 + 1);
    let mut settled = 0;
    loop {
        for (index, planned) in schedule.requests.iter().enumerate() {
            if inboxes[index].is_none() && planned.arrive <= settled {
                let (sender, events) = unbounded();
                engine.submit(id(index), submission(planned), sender);
                inboxes[index] = Some(events);
            }
            if planned.cancel.is_some_and(|cancel| cancel <= settled) && inboxes[index].is_some() {
                engine.cancel(id(index));
            }
        }
        match engine.turn()? {
            Turn::Queued => {}
            Turn::Settled(round) => {
                settled += 1;
                if let Kind::Decode = round.round.kind {
                    trail.returns += u64::from(pictures && round.how == Ran::Replayed);
                    pictures = round.round.verdict == Verdict::Eager(EagerReason::ImageBearing);
                }
                trail.rounds.count(round.how);
                for trace in round.traces {
                    trail.lives[trace.request.0 as usize - 1].traces.push(trace);
                }
            }
            Turn::Idle if inboxes.iter().all(Option::is_some) => break,
            // Nothing runs until the next arrival.
            Turn::Idle => settled += 1,
        }
    }
    let told = trail.lives.iter_mut().zip(&mut trail.each);
    for ((life, rounds), events) in told.zip(inboxes.into_iter().flatten()) {
        for event in events.try_iter() {
            match event {
                Event::Token(token) => life.ids.push(token.id),
                Event::Finished(finished) => {
                    life.end = finished.reason.to_string();
                    *rounds = finished.rounds;
                }
                other => life.end = format!("{other:?}"),
            }
        }
        // Requests are numbered alike in every schedule, but not alike alone and in a crowd.
        life.traces.iter_mut().for_each(|trace| trace.request = RequestId(0));
    }
    Ok(trail)
}

impl Planned {
    /// The position behind the last row of a picture.
    fn pictures_end(&self) -> usize {
        let spans = self.media.iter().flat_map(|media| &media.spans);
        spans.map(|span| span.first + span.rows()).max().unwrap_or(0)
    }

    /// Leaves out the last picture or clip with its placeholders, if there is one. What stands around them is text.
    fn leave_out_a_picture(&mut self) -> bool {
        let Some(media) = self.media.pop() else { return false };
        for span in media.spans.iter().rev() {
            self.prompt.drain(span.first..span.first + span.rows());
        }
        true
    }

    /// What a scene says of its pictures: that there are some, and where.
    fn seen(&self) -> String {
        let spans: Vec<String> = self
            .media
            .iter()
            .flat_map(|media| &media.spans)
            .map(|span| format!("{} x {} rows at {}", span.height, span.width, span.first))
            .collect();
        if spans.is_empty() { String::new() } else { format!(" image # {}", spans.join(", ")) }
    }
}

fn submission(planned: &Planned) -> Submission {
    let mut submission = Submission::new(planned.prompt.clone());
    submission.max_tokens = Some(planned.max_tokens);
    submission.sampling = planned.sampling.clone();
    submission.class = planned.class;
    submission.media = planned.media.clone();
    submission
}

/// Entries whose ids differ.
fn distinct(mut bias: Vec<(u32, f32)>) -> Vec<(u32, f32)> {
    bias.sort_by_key(|entry| entry.0);
    bias.dedup_by_key(|entry| entry.0);
    bias
}

impl Trail {
    /// A digest of everything that was seen.
    pub fn digest(&self) -> graph::Digest {
        let mut digest = Digester::new();
        for life in &self.lives {
            digest.bytes(bytemuck::cast_slice(&life.ids)).text(&life.end);
            for trace in &life.traces {
                digest.number(trace.length.into()).digest(trace.logits.unwrap_or_default());
                digest.digest(trace.state.whole());
            }
        }
        digest.finish()
    }

    /// Keeps nothing of what rounds left in lanes but their logits.
    pub fn forget_state(&mut self) {
        let traces = self.lives.iter_mut().flat_map(|life| &mut life.traces);
        traces.for_each(|trace| trace.state.parts.clear());
    }

    /// Why the rounds of a schedule were not executed as pictures ask for, if they were not: those of image-bearing lanes
    /// are eager for that reason, and no others are.
    pub(super) fn astray(&self, schedule: &Schedule) -> Option<String> {
        let wrong = |(planned, rounds): &(&Planned, &RoundCounts)| {
            let [pictures, prompt] = [EagerReason::ImageBearing, EagerReason::PromptPass].map(reason_text);
            match planned.media.is_empty() {
                true => rounds.eager.contains_key(pictures),
                false => {
                    let graphs = rounds.replayed + rounds.captured;
                    graphs > 0 || rounds.eager.keys().any(|reason| ![pictures, prompt].contains(reason))
                }
            }
        };
        let index = schedule.requests.iter().zip(&self.each).position(|one| wrong(&one))?;
        let (count, rounds) = (schedule.requests[index].media.len(), &self.each[index]);
        Some(format!("request R{index}, with {count} pictures, had these rounds: {rounds}\n"))
    }

    /// Where two trails part, as text.
    pub fn difference(&self, other: &Trail) -> String {
        for (index, (a, b)) in self.lives.iter().zip(&other.lives).enumerate() {
            if let Some((a, b)) = a.traces.iter().zip(&b.traces).find(|(a, b)| a != b) {
                let parts = a.state.differences(&b.state);
                let logits = if a.logits == b.logits { "equal" } else { "different" };
                return format!(
                    "request R{index} parts at length {} and {}: logits {logits}, state differs in {parts:?}\n",
                    a.length, b.length
                );
            }
            if a != b {
                return format!(
                    "request R{index}: ids {:?} ({}) and {:?} ({})\n",
                    a.ids, a.end, b.ids, b.end
                );
            }
        }
        "the trails are equal\n".into()
    }
}

impl Life {
    /// Shortens both lives to what they have in common in length.
    pub fn keep_common(&mut self, other: &mut Life) {
        let ids = self.ids.len().min(other.ids.len());
        let traces = self.traces.len().min(other.traces.len());
        for life in [self, other] {
            life.ids.truncate(ids);
            life.traces.truncate(traces);
            life.end.clear();
        }
    }
}
