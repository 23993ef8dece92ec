//! What the server is told at its start.

use std::fmt;
use std::time::Duration;

use tokio::sync::Semaphore;
use vision::{Budget, Limits};

use crate::pictures::Allowed;

/// The settings of a server. The defaults are those of the command line.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The address to listen on.
    pub host: String,
    /// The port; 0 takes a free one.
    pub port: u16,
    /// The key that clients must show, if any.
    pub api_key: Option<Secret>,
    /// Origins whose pages may call; `*` is all.
    pub cors_origins: Vec<String>,
    /// The name that clients call the model by.
    pub served_name: String,
    /// Replies that are made at once.
    pub lanes: usize,
    /// Replies that may wait for a lane.
    pub queue: usize,
    /// Most tokens of a reply whose request does not say, as far as the context has room.
    pub max_tokens_default: u32,
    /// Whether chat replies begin with reasoning when a request does not say; none: the template decides.
    pub default_thinking: Option<bool>,
    /// Most replies to one prompt.
    pub max_n: usize,
    /// Bytes of the largest body.
    pub body_limit: usize,
    /// Most pictures of a request; frames of a video are pictures.
    pub max_pictures: usize,
    /// Most pixels of all pictures of a request, as they are sent.
    pub max_picture_pixels: u64,
    /// Bytes that the pictures of all requests under way may hold.
    pub picture_memory: u64,
    /// How long a client may take no byte of an answer that is ready for it.
    pub write_timeout: Duration,
    /// How long a client may take to send the head of a request, and then its body.
    pub header_timeout: Duration,
    /// How long a connection may be idle between requests.
    pub idle_timeout: Duration,
    /// How long a stream may be silent before a comment is sent; zero is for ever.
    pub keep_alive: Duration,
    /// The longest time from the word to stop to the end of the process.
    pub drain: Duration,
    /// The longest time from a failure of the engine to the end of the process.
    pub failure_exit: Duration,
    /// The digest that the reply at the start must have.
    pub sanity_sha: Option<String>,
    /// A digest of all settings of the process.
    pub config_hash: String,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            host: "127.0.0.1".into(),
            port: 8000,
            api_key: None,
            cors_origins: Vec::new(),
            served_name: "model".into(),
            lanes: 16,
            queue: 256,
            max_tokens_default: 4096,
            default_thinking: None,
            max_n: 16,
            body_limit: 4 << 20,
            max_pictures: Budget::default().pictures,
            max_picture_pixels: Budget::default().pixels,
            picture_memory: 2 << 30,
            write_timeout: Duration::from_secs(30),
            header_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            keep_alive: Duration::from_secs(15),
            drain: Duration::from_secs(25),
            failure_exit: Duration::from_secs(10),
            sanity_sha: None,
            config_hash: String::new(),
        }
    }
}

impl Settings {
    /// What the pictures of one request may cost.
    pub(crate) fn pictures(&self) -> Allowed {
        let budget = Budget { pictures: self.max_pictures, pixels: self.max_picture_pixels };
        Allowed { budget, limits: Limits::default() }
    }

    /// The memory for pictures, in the unit in which it is given out.
    pub(crate) fn picture_memory_kib(&self) -> usize {
        usize::try_from(self.picture_memory >> 10).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS)
    }
}

/// A text that is never printed.
#[derive(Clone)]
pub struct Secret(pub String);

impl Secret {
    /// Whether `other` is the same text. The time it takes says nothing about where they differ.
    pub(crate) fn is(&self, other: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differ = own.iter().zip(other).fold(0, |differ, (a, b)| differ | (a ^ b));
        own.len() == other.len() && differ == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_compared_whole_and_never_shown() {
        let key = Secret("abc".into());
        assert!(key.is(b"abc"));
        for other in ["", "ab", "abd", "abcd", "xbc"] {
            assert!(!key.is(other.as_bytes()), "{other}");
        }
        let settings = Settings { api_key: Some(key), ..Settings::default() };
        assert!(!format!("{settings:?}").contains("abc"));
    }
}
