//! What the CUDA twins leave out: settings of a model that the host device alone runs.

use crate::config::ModelConfig;
use crate::error::Error;

/// Refuses a model whose sizes are past what the CUDA kernels compute: they would leave its rows unwritten.
///
/// # Errors
/// Names the setting, its value and the limit.
pub(super) fn check(config: &ModelConfig) -> Result<(), Error> {
    let top = config.indexer_budget.checked_div(config.indexer_compress_ratio).unwrap_or(0);
    let limits = [
        ("linear_key_head_dim", config.linear_key_head_dim, kernels::delta::CUDA_KEY_WIDTH),
        ("head_dim", config.head_dim, kernels::attend::CUDA_WIDTH),
        ("hidden_size", config.hidden_size, kernels::residual::CUDA_WIDTH),
        ("hidden_size", config.hidden_size, kernels::experts::CUDA_COLUMNS),
        ("moe_intermediate_size", config.moe_intermediate_size, kernels::experts::CUDA_INNER),
        (
            "shared_expert_intermediate_size",
            config.shared_expert_intermediate_size,
            kernels::experts::CUDA_INNER,
        ),
        ("num_experts", config.num_experts, kernels::router::CUDA_EXPERTS),
        ("num_experts_per_tok", config.num_experts_per_tok, kernels::router::CUDA_CHOICES),
        ("indexer_budget / indexer_compress_ratio", top, kernels::index::CUDA_TOP),
    ];
    match limits.into_iter().find(|&(_, value, most)| value > most as usize) {
        None => Ok(()),
        Some((setting, value, most)) => Err(Error::Setting(format!(
            "config.json: {setting} is {value}, and the CUDA kernels take at most {most}; run the model with \
             --device host"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_most_is_taken_and_one_more_is_refused_by_name() {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let tiny = ModelConfig::open(&tiny).expect("the repository's own model");
        check(&tiny).expect("it is small");
        let fields: [(&str, usize, fn(&mut ModelConfig, usize)); 8] = [
            ("linear_key_head_dim", 256, |config, value| config.linear_key_head_dim = value),
            ("head_dim", 256, |config, value| config.head_dim = value),
            ("hidden_size", 10240, |config, value| config.hidden_size = value),
            ("moe_intermediate_size", 1024, |config, value| config.moe_intermediate_size = value),
            ("shared_expert_intermediate_size", 1024, |config, value| {
                config.shared_expert_intermediate_size = value;
            }),
            ("num_experts", 2048, |config, value| config.num_experts = value),
            ("num_experts_per_tok", 32, |config, value| config.num_experts_per_tok = value),
            ("indexer_budget / indexer_compress_ratio", 2560, |config, value| {
                config.indexer_budget = value * config.indexer_compress_ratio;
            }),
        ];
        for (name, most, set) in fields {
            let mut config = tiny.clone();
            set(&mut config, most);
            check(&config).unwrap_or_else(|error| panic!("{name} of {most}: {error}"));
            set(&mut config, most + 1);
            let says = check(&config).expect_err("past the limit").to_string();
            for word in [name, &(most + 1).to_string(), &format!("at most {most};"), "--device host"] {
                assert!(says.contains(word), "{word:?} is not in: {says}");
            }
        }
    }
}
