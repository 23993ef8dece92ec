//! Decode rounds from graphs against the same rounds launch by launch: whole turns of the engine.

use benches::{Crowd, Figure, Meter, Unit, note, options, small, tiny};

const PROMPT: usize = 32;
/// Runs of either kind in turn, for their ratio: what else the machine does then bears on both alike.
const PAIRS: usize = 11;

fn main() {
    let mut meter = Meter::new("round");
    for (model, dir) in [("small", small()), ("tiny", tiny())] {
        let mut graph = Crowd::open(&dir, &options(16, 1024));
        let mut eager =
            Crowd::open(&dir, &runtime::engine::EngineOptions { graphs: false, ..options(16, 1024) });
        for lanes in [1, 4, 16] {
            let both = [&mut graph, &mut eager];
            let ids = both.map(|crowd| {
                crowd.decode(lanes, PROMPT, 8);
                crowd.made().to_vec()
            });
            assert_eq!(ids[0], ids[1], "graph = eager");
            let mut time = |name: &str, crowd: &mut Crowd| {
                let figure = Figure::new(format!("{model} {lanes} lanes {name}"), Unit::Microseconds);
                meter.measure(&figure, |rounds| crowd.decode(lanes, PROMPT, rounds))
            };
            if time("graph", &mut graph).and(time("eager", &mut eager)).is_some() {
                let pair = |_| {
                    let [graph, eager] =
                        [&mut graph, &mut eager].map(|crowd| crowd.decode(lanes, PROMPT, 24));
                    eager.as_secs_f64() / graph.as_secs_f64()
                };
                let mut ratios: Vec<f64> = (0..PAIRS).map(pair).collect();
                ratios.sort_by(f64::total_cmp);
                note("round", &format!("{model} {lanes} lanes eager / graph"), "ratio", ratios[PAIRS / 2]);
            }
        }
        let (graph, eager) = (graph.engine.stats().rounds, eager.engine.stats().rounds);
        assert!(
            graph.replayed > 0 && graph.captured == 0 && graph.eager.keys().eq([&"prompt pass"]),
            "{graph}"
        );
        assert!(eager.replayed == 0 && eager.eager.contains_key("graphs off"), "{eager}");
    }
}
