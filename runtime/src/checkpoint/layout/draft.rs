//! Tensors of the draft layer. It has no embedding and no head of its own.

use super::text::{FinalMixer, HyperConnection, Moe, SparseAttention};
use super::{Scope, Spec, tensors};
use crate::config::ModelConfig;

/// The draft layer.
#[derive(Debug, Clone)]
pub struct Draft {
    /// What turns streams and a token into the layer's input.
    pub fusion: Fusion,
    /// Streams around the attention.
    pub attn_hyper_connection: HyperConnection,
    /// Attention over selected blocks.
    pub attention: SparseAttention,
    /// Streams around the experts.
    pub mlp_hyper_connection: HyperConnection,
    /// Mixture of experts.
    pub moe: Moe,
    /// The mixer that turns the streams into the head's input.
    pub final_mixer: FinalMixer,
}

tensors! {
    /// Joins the main model's streams with the embedding of the next token.
    Fusion {
        /// `[hidden]`
        norm_embedding,
        /// `[streams * hidden]`, one norm over all of it
        norm_hidden,
        /// `[hidden, hidden]`
        fc_embedding,
        /// `[hidden, hidden]`, the same for every stream
        fc_hidden,
    }
}

impl Draft {
    pub(super) fn new(at: &Scope<'_>, c: &ModelConfig) -> Self {
        let hidden = c.hidden_size;
        let layer = at.within("layers.0.");
        Self {
            fusion: Fusion {
                norm_embedding: at.weight("pre_fc_norm_embedding.weight", &[hidden]),
                norm_hidden: at.weight("pre_fc_norm_hidden.weight", &[c.streams_width()]),
                fc_embedding: at.weight("fc_embedding.weight", &[hidden, hidden]),
                fc_hidden: at.weight("fc_hidden.weight", &[hidden, hidden]),
            },
            attn_hyper_connection: HyperConnection::new(&layer.within("attn_hyper_connection."), c),
            attention: SparseAttention::new(&layer.within("self_attn."), c),
            mlp_hyper_connection: HyperConnection::new(&layer.within("mlp_hyper_connection."), c),
            moe: Moe::new(&layer.within("mlp."), c),
            final_mixer: FinalMixer::new(&at.within("hyper_connection_mixer."), c),
        }
    }

    pub(super) fn gather<'a>(&'a self, specs: &mut Vec<&'a Spec>) {
        self.fusion.gather(specs);
        self.attn_hyper_connection.gather(specs);
        self.attention.gather(specs);
        self.mlp_hyper_connection.gather(specs);
        self.moe.gather(specs);
        self.final_mixer.gather(specs);
    }
}
