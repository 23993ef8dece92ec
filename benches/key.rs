//! The round key, the digest of a lane's buffers, and what an audit adds to a round.

use std::hint::black_box;

use benches::{Crowd, Figure, Meter, Unit, options, small, spent_on};
use kernels::table::Kind;
use runtime::model::{Group, Picks, RoundShape};

fn main() {
    let mut meter = Meter::new("key");
    let mut crowd = Crowd::open(&small(), &options(64, 1024));
    crowd.gather(64, 8, 400);
    let (slabs, runner, bank) = (crowd.engine.slabs(), crowd.engine.runner(), crowd.engine.bank());
    assert_eq!(slabs.len(), 4, "64 lanes in slabs of 16");
    let mut digests: Vec<graph::Digest> = slabs.iter().map(|lanes| lanes.digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), slabs.len(), "every slab has a digest of its own");
    let mut time = |name: &str, need: Option<f64>, work: &mut dyn FnMut()| {
        let figure = Figure { need, ..Figure::new(name, Unit::Microseconds) }.seconds(1.0);
        meter.measure(&figure, |times| spent_on(|| (0..times).for_each(|_| work())).0);
    };

    time("lane digest", Some(2.0), &mut || {
        black_box(black_box(&slabs[0]).digest());
    });
    for count in [1, 4] {
        let groups: Vec<Group<'_>> = slabs[..count].iter().map(|lanes| Group { lanes, rows: 16 }).collect();
        let shape = RoundShape { kind: Kind::Decode, groups: &groups, picks: Picks::All };
        let key = runner.key(&shape);
        assert_eq!((key.rows() as usize, key.buffers.len()), (16 * count, count));
        time(&format!("round key {count} slabs"), None, &mut || {
            black_box(runner.key(black_box(&shape)));
        });
        time(&format!("look-up in the bank {count} slabs"), None, &mut || {
            black_box(bank.get(black_box(&key)));
        });
        time(&format!("emission and its digest {count} slabs"), None, &mut || {
            black_box(runner.emission(black_box(&shape)).expect("legal launches").digest());
        });
        if let Some(exec) = bank.get(&key) {
            assert_eq!(exec.digest(), runner.emission(&shape).expect("legal launches").digest());
        }
    }
}
