//! Pictures on two ranks: rank 0 encodes, rank 1 attaches, and what they make is what one makes.

use crossbeam_channel::unbounded;
use planner::RequestId;
use runtime::engine::{EngineOptions, Event, Vision};
use runtime::receipts::{Planned, Random, Schedule, play};
use runtime::request::Submission;
use tests::tower::{media, prompts};

use crate::pair::{end, one, recorded, same, sighted, told, two};

/// Random requests, of which some show a recorded picture or clip.
fn schedule(random: &mut Random) -> Schedule {
    let mut schedule = Schedule::random(random, 1009, 7, 150, 12);
    let cases = prompts();
    for planned in &mut schedule.requests {
        if random.below(2) == 0 {
            let case = &cases[random.below(cases.len() as u32) as usize];
            let before = planned.prompt.len();
            planned.media = media(case);
            let spans = planned.media.iter_mut().flat_map(|media| &mut media.spans);
            spans.for_each(|span| span.first += before);
            planned.prompt.extend(case.input_ids());
        }
    }
    schedule
}

#[test]
fn two_ranks_see_what_one_sees() {
    let ((mut pair, follower), mut alone) = (two(&sighted(), &sighted()), one(&sighted()));
    let mut random = Random::new(31);
    for _ in 0..12 {
        let mut schedule = schedule(&mut random);
        // What arrives when is counted in rounds, and a cancel may come before or after a picture is encoded.
        schedule.requests.iter_mut().for_each(|planned: &mut Planned| planned.cancel = None);
        let [two, one] = same(&mut pair, &mut alone, &schedule);
        assert_eq!(two, one);
    }
    let stats = pair.stats();
    assert!(stats.rounds.eager["image-bearing"] > 20 && stats.rounds.replayed > 20, "{}", stats.rounds);
    assert!(stats.pictures.hits > 5 && stats.pictures.misses > 3, "{:?}", stats.pictures);
    end(pair, follower);
}

/// Rounds overlap, requests are called off, features are few: the ranks stay in step.
#[test]
fn overlapped_ranks_stay_in_step_with_pictures() {
    let features = Some(30 * 64 * 2);
    let options = EngineOptions { depth: 2, trace: false, feature_bytes: features, audit: 7, ..sighted() };
    let (mut pair, follower) = two(&options, &options);
    let mut random = Random::new(32);
    for _ in 0..12 {
        play(&mut pair, &schedule(&mut random)).expect("both ranks do the same");
    }
    let stats = pair.stats();
    assert!(
        stats.pictures.evictions > 3 && stats.rounds.replayed > 20,
        "{:?} {}",
        stats.pictures,
        stats.rounds
    );
    assert_eq!((stats.lanes, stats.waiting, stats.pages_free), (0, 0, stats.pages_total));
    end(pair, follower);
}

/// Of a picture that several requests show at once, rank 1 has one copy, and it goes with the last prompt that needs it.
#[test]
fn a_picture_is_sent_once_while_it_is_needed() {
    let (mut pair, follower) = two(&sighted(), &sighted());
    let mut alone = one(&sighted());
    let shows = |name: &str| {
        let Submission { prompt, media, .. } = recorded(name);
        let (sampling, class) = (Default::default(), planner::ClassId(0));
        Planned { arrive: 0, prompt, max_tokens: 5, sampling, cancel: None, class, media }
    };
    let mut requests = vec![shows("image_two"), shows("image_two"), shows("image_wide"), shows("image_two")];
    requests[3].arrive = 40;
    let schedule = Schedule { requests };
    same(&mut pair, &mut alone, &schedule);
    end(pair, follower);
}

/// What rank 0 refuses, or what is called off while it is encoded, never reaches rank 1: it has no word for it, and the
/// two go on in step.
#[test]
fn refused_pictures_stay_with_rank_0() {
    let (mut pair, follower) = two(&sighted(), &sighted());
    let mut wrong = recorded("image_one");
    wrong.prompt.truncate(6);
    assert!(matches!(told(&mut pair, 1, wrong), Event::Refused(_)));
    let (sender, events) = unbounded();
    pair.submit(RequestId(2), recorded("image_two"), sender);
    pair.turn().expect("runs");
    pair.cancel(RequestId(2));
    assert!(matches!(events.try_iter().last(), Some(Event::Finished(_))));
    assert!(matches!(told(&mut pair, 3, recorded("image_two")), Event::Finished(_)));
    end(pair, follower);
}

/// If one of the ranks is to take no pictures, none are taken.
#[test]
fn a_rank_that_takes_no_pictures_blinds_both() {
    let blind = EngineOptions { vision: Vision::Off, ..sighted() };
    for (leads, follows) in [(&blind, &sighted()), (&sighted(), &blind)] {
        let (mut pair, follower) = two(leads, follows);
        let end_of = told(&mut pair, 1, recorded("image_one"));
        assert!(matches!(&end_of, Event::Refused(why) if why.contains("takes none")), "{end_of:?}");
        end(pair, follower);
    }
}
