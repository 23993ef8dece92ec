//! `/metrics`: what the engine and the server have done, in Prometheus' text format.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};
use runtime::engine::Stats;

use super::state::{App, Phase};

/// The reasons for which a round is eager; each has a series from the start.
const EAGER: [&str; 7] =
    ["prompt pass", "first sight", "capture failed", "graphs off", "audit", "image-bearing", "pocketed"];

/// How replies end; each has a series from the start.
const OUTCOMES: [&str; 7] = ["stop", "length", "cancelled", "slow", "failed", "stopped", "refused"];

/// What becomes of pictures; each has a series from the start.
const PICTURES: [&str; 2] = ["decoded", "refused"];

/// Where the features of pictures come from; each has a series from the start.
const FEATURES: [&str; 2] = ["kept", "made"];

/// The status of a request whose client was gone before it had one.
const GONE: &str = "499";

/// All metrics. Those of the engine are brought up to date when they are asked for.
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    pub(crate) replies: IntCounterVec,
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) duration: Histogram,
    pub(crate) prompt_tokens: IntCounter,
    pub(crate) completion_tokens: IntCounter,
    pictures: IntCounterVec,
    pub(crate) connections: IntGauge,
    active: IntGauge,
    ready: IntGauge,
    lanes: IntGauge,
    waiting: IntGauge,
    pages_free: IntGauge,
    pages: IntGauge,
    graphs: IntGauge,
    graph_bytes: IntGauge,
    rounds: IntCounterVec,
    evictions: IntCounter,
    audits_failed: IntCounter,
    slabs_refused: IntCounter,
    features: IntCounterVec,
    feature_bytes: IntGauge,
}

impl Metrics {
    pub(crate) fn new(started: u64) -> Metrics {
        let registry = Registry::new();
        let counter =
            |name: &str, help: &str| keep(&registry, IntCounter::new(format!("roundhouse_{name}"), help));
        let gauge =
            |name: &str, help: &str| keep(&registry, IntGauge::new(format!("roundhouse_{name}"), help));
        let seconds = |name: &str, help: &str, buckets: &[f64]| {
            let options = HistogramOpts::new(format!("roundhouse_{name}_seconds"), help);
            keep(&registry, Histogram::with_opts(options.buckets(buckets.to_vec())))
        };
        let labelled = |name: &str, help: &str, labels: &[&str]| {
            keep(&registry, IntCounterVec::new(Opts::new(format!("roundhouse_{name}"), help), labels))
        };
        let waits = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
        let steps = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];
        let lives = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
        let metrics = Metrics {
            requests: labelled("requests_total", "Requests by route and status.", &["route", "status"]),
            replies: labelled("replies_total", "Replies by how they ended.", &["outcome"]),
            first_token: seconds("time_to_first_token", "From a request to its first token.", &waits),
            inter_token: seconds("inter_token", "From one token of a reply to the next.", &steps),
            duration: seconds("request_duration", "From a request to the end of its reply.", &lives),
            prompt_tokens: counter("prompt_tokens_total", "Tokens of prompts."),
            completion_tokens: counter("completion_tokens_total", "Tokens made."),
            pictures: labelled(
                "pictures_total",
                "Pictures and frames that were decoded, and those for which a request was refused.",
                &["outcome"],
            ),
            connections: gauge("connections", "Open connections."),
            active: gauge("requests_active", "Requests that are being answered."),
            ready: gauge("ready", "1 if a token can be made."),
            lanes: gauge("lanes", "Lanes in use."),
            waiting: gauge("requests_waiting", "Replies that wait for a lane or pages."),
            pages_free: gauge("pages_free", "Pages of 64 positions that are free."),
            pages: gauge("pages", "Pages of 64 positions."),
            graphs: gauge("graphs", "Recorded rounds."),
            graph_bytes: gauge("graph_bytes", "Memory of recorded rounds in bytes."),
            rounds: labelled("rounds_total", "Rounds by how they ran, and why.", &["outcome", "reason"]),
            evictions: counter("graph_evictions_total", "Recorded rounds that were given up."),
            audits_failed: counter("audits_failed_total", "Audits that found a graph unlike its round."),
            slabs_refused: counter("slabs_refused_total", "Slabs of lanes that found no memory."),
            features: labelled(
                "picture_features_total",
                "Pictures by whether their features were there or had to be made.",
                &["outcome"],
            ),
            feature_bytes: gauge("picture_feature_bytes", "Memory of kept features of pictures in bytes."),
            registry: registry.clone(),
        };
        let help = "When the process started, in seconds since 1970.";
        let start: Gauge = keep(&registry, Gauge::new("roundhouse_start_time_seconds", help));
        start.set(started as f64);
        let build = Opts::new("roundhouse_build_info", "The version of the program.");
        let build: IntGaugeVec = keep(&registry, IntGaugeVec::new(build, &["version"]));
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        for (outcome, reason) in [("captured", ""), ("replayed", "")] {
            metrics.rounds.with_label_values(&[outcome, reason]);
        }
        EAGER.iter().for_each(|reason| {
            metrics.rounds.with_label_values(&["eager", reason]);
        });
        OUTCOMES.iter().for_each(|outcome| {
            metrics.replies.with_label_values(&[outcome]);
        });
        PICTURES.iter().for_each(|outcome| {
            metrics.pictures.with_label_values(&[outcome]);
        });
        FEATURES.iter().for_each(|outcome| {
            metrics.features.with_label_values(&[outcome]);
        });
        metrics.requests.with_label_values(&["/health", "200"]);
        metrics
    }

    /// Counts a request by its route, once it is answered or its client is gone.
    pub(crate) fn request(&self, route: String) -> Unanswered<'_> {
        Unanswered { requests: &self.requests, route, status: None }
    }

    /// Counts replies that have ended.
    pub(crate) fn ended(&self, outcome: &str, replies: u64) {
        self.replies.with_label_values(&[outcome]).inc_by(replies);
    }

    /// Counts a picture, or a frame, that was decoded or refused.
    pub(crate) fn picture(&self, decoded: bool) {
        self.pictures.with_label_values(&[PICTURES[usize::from(!decoded)]]).inc();
    }

    /// Pictures and frames that were decoded.
    #[cfg(test)]
    pub(crate) fn pictures_decoded(&self) -> u64 {
        self.pictures.with_label_values(&[PICTURES[0]]).get()
    }

    /// Brings the engine's own counts up to date.
    fn take_in(&self, stats: &Stats) {
        let rounds = |labels: &[&str; 2], total| raise(&self.rounds.with_label_values(labels), total);
        rounds(&["captured", ""], stats.rounds.captured);
        rounds(&["replayed", ""], stats.rounds.replayed);
        stats.rounds.eager.iter().for_each(|(reason, total)| rounds(&["eager", reason], *total));
        for (outcome, total) in FEATURES.iter().zip([stats.pictures.hits, stats.pictures.misses]) {
            raise(&self.features.with_label_values(&[outcome]), total);
        }
        self.feature_bytes.set(stats.pictures.bytes as i64);
        raise(&self.evictions, stats.bank.evicted);
        raise(&self.audits_failed, stats.audits_failed);
        raise(&self.slabs_refused, stats.slabs_refused);
        self.lanes.set(stats.lanes as i64);
        self.waiting.set(stats.waiting as i64);
        self.pages_free.set(stats.pages_free.into());
        self.pages.set(stats.pages_total.into());
        self.graphs.set(stats.graphs as i64);
        self.graph_bytes.set(stats.graph_bytes as i64);
    }

    fn text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text).expect("memory takes every text");
        text
    }
}

/// A request that is counted when it is dropped, with its status if it had an answer.
pub(crate) struct Unanswered<'a> {
    requests: &'a IntCounterVec,
    route: String,
    status: Option<StatusCode>,
}

impl Unanswered<'_> {
    /// Its answer is there.
    pub(crate) fn answered(mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let status = self.status.as_ref().map_or(GONE, StatusCode::as_str);
        self.requests.with_label_values(&[self.route.as_str(), status]).inc();
    }
}

/// `/metrics`.
pub(crate) fn answer(app: &App) -> Response {
    let metrics = &app.metrics;
    metrics.active.set(app.active() as i64);
    metrics.ready.set((app.phase() == Phase::Ready).into());
    if let Some(model) = app.loaded() {
        metrics.take_in(&model.handle.stats());
    }
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], metrics.text()).into_response()
}

/// Sets a counter to a total that is counted elsewhere and never falls.
fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

fn keep<T: prometheus::core::Collector + Clone + 'static>(
    registry: &Registry,
    made: prometheus::Result<T>,
) -> T {
    let metric = made.expect("names of metrics are well formed");
    registry.register(Box::new(metric.clone())).expect("no two metrics have one name");
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_follow_the_engine_and_never_fall() {
        let metrics = Metrics::new(7);
        let mut stats = Stats::default();
        stats.rounds.replayed = 3;
        stats.rounds.eager.insert("prompt pass", 2);
        metrics.take_in(&stats);
        stats.rounds.replayed = 5;
        metrics.take_in(&stats);
        let text = String::from_utf8(metrics.text()).unwrap();
        for line in [
            "roundhouse_rounds_total{outcome=\"replayed\",reason=\"\"} 5",
            "roundhouse_rounds_total{outcome=\"eager\",reason=\"prompt pass\"} 2",
            "roundhouse_start_time_seconds 7",
            "# TYPE roundhouse_time_to_first_token_seconds histogram",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is not in\n{text}");
        }
    }
}
