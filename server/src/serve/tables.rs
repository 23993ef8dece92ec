//! The fields of every wire. One table per object says what is carried and what is accepted without effect; anything
//! else is refused.

/// The fields of one object of a wire.
pub(crate) struct Table {
    /// Fields that have an effect.
    pub(crate) carried: &'static [&'static str],
    /// Fields that are accepted, have none, and are named in the answer.
    pub(crate) ignorable: &'static [&'static str],
}

/// `/v1/chat/completions`.
pub(crate) const CHAT: Table = Table {
    carried: &[
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stream",
        "stream_options",
        "stop",
        "stop_token_ids",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "ignore_eos",
        "reasoning_effort",
        "enable_thinking",
        "chat_template_kwargs",
        "response_format",
        "tools",
        "tool_choice",
    ],
    ignorable: IGNORABLE,
};

/// `/v1/completions`.
pub(crate) const COMPLETIONS: Table = Table {
    carried: &[
        "model",
        "prompt",
        "suffix",
        "echo",
        "best_of",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stream",
        "stream_options",
        "stop",
        "stop_token_ids",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "ignore_eos",
    ],
    ignorable: IGNORABLE,
};

const IGNORABLE: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "add_special_tokens",
];

/// `/tokenize`.
pub(crate) const TOKENIZE: Table = Table {
    carried: &[
        "model",
        "prompt",
        "messages",
        "add_generation_prompt",
        "reasoning_effort",
        "enable_thinking",
        "chat_template_kwargs",
    ],
    ignorable: &["add_special_tokens"],
};

/// `/detokenize`.
pub(crate) const DETOKENIZE: Table = Table { carried: &["model", "tokens"], ignorable: &[] };

/// `stream_options`.
pub(crate) const STREAM_OPTIONS: Table = Table { carried: &["include_usage"], ignorable: &[] };

/// `chat_template_kwargs`.
pub(crate) const TEMPLATE: Table =
    Table { carried: &["enable_thinking", "reasoning_effort"], ignorable: &[] };

/// `response_format`.
pub(crate) const FORMAT: Table = Table { carried: &["type", "json_schema"], ignorable: &[] };

/// A message.
pub(crate) const MESSAGE: Table = Table {
    carried: &["role", "content", "reasoning_content", "tool_calls"],
    ignorable: &["name", "refusal", "annotations", "audio", "function_call"],
};

/// A part of a message's content: text,
pub(crate) const PART: Table = Table { carried: &["type", "text"], ignorable: &[] };

/// a picture,
pub(crate) const PICTURE_PART: Table = Table { carried: &["type", "image_url"], ignorable: &[] };

/// and what says where it is,
pub(crate) const IMAGE_URL: Table = Table { carried: &["url", "detail"], ignorable: &[] };

/// or the frames of a clip.
pub(crate) const CLIP_PART: Table = Table { carried: &["type", "video", "fps"], ignorable: &[] };

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_field_is_in_two_lists() {
        for table in [
            &CHAT,
            &COMPLETIONS,
            &TOKENIZE,
            &DETOKENIZE,
            &MESSAGE,
            &PART,
            &PICTURE_PART,
            &IMAGE_URL,
            &CLIP_PART,
        ] {
            let all: Vec<_> = table.carried.iter().chain(table.ignorable).collect();
            assert_eq!(all.len(), all.iter().collect::<BTreeSet<_>>().len());
        }
    }
}
