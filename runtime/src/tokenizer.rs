//! Text to token ids, and token ids back to text, whole or piece by piece.
//!
//! Encoding is the `tokenizers` crate over the checkpoint's `tokenizer.json`, unchanged. Decoding is
//! ours: a byte-level token stands for a fixed run of bytes, so a text is those runs joined, with
//! U+FFFD where they are not UTF-8. Doing it over bytes makes a stream cost the same as a whole text.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper};

/// Ids stay below this; the tables here have a place for every id.
const MAX_ID: u32 = 1 << 24;

/// The tokenizer of one checkpoint.
pub struct Tokenizer {
    encoder: tokenizers::Tokenizer,
    tokens: Arc<TokenBytes>,
    special_ids: Vec<u32>,
    token_count: usize,
    /// Most bytes of a text that one id can stand for; none if a text can be of any length for its ids.
    most_bytes: Option<usize>,
}

/// What each id stands for, as one run of bytes with a start per id.
struct TokenBytes {
    bytes: Vec<u8>,
    /// `starts[id]..starts[id + 1]` are the bytes of `id`; an id without text has an empty run.
    starts: Vec<u32>,
    special: Vec<bool>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` from the checkpoint folder `dir`.
    pub fn open(dir: &Path) -> Result<Tokenizer, TextError> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| TextError::Read { path: path.clone(), source })?;
        let encoder = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|why| TextError::Parse { path: path.clone(), why: why.to_string() })?;
        refuse_lossy(&encoder).map_err(|why| TextError::Parse { path: path.clone(), why: why.into() })?;
        if !matches!(encoder.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(TextError::NotByteLevel { path });
        }

        let by_id: BTreeMap<u32, String> =
            encoder.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        let token_count = by_id.len();
        let last_id = by_id.last_key_value().map_or(MAX_ID, |(&id, _)| id);
        if last_id >= MAX_ID {
            let why = format!("it has {token_count} tokens up to id {last_id}");
            return Err(TextError::Parse { path, why });
        }
        let mut special_ids: Vec<u32> = encoder
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| id)
            .collect();
        special_ids.sort_unstable();
        let tokens = Arc::new(TokenBytes::new(&by_id, &special_ids));
        let most_bytes = most_bytes(&encoder, &tokens);
        Ok(Tokenizer { encoder, tokens, special_ids, token_count, most_bytes })
    }

    /// A tokenizer for a model without texts: its `ids` ids stand for nothing.
    pub fn blank(ids: usize) -> Tokenizer {
        let tokens = TokenBytes { bytes: Vec::new(), starts: vec![0], special: vec![false; ids] };
        Tokenizer {
            encoder: tokenizers::Tokenizer::new(tokenizers::models::bpe::BPE::default()),
            tokens: Arc::new(tokens),
            special_ids: Vec::new(),
            token_count: 0,
            most_bytes: None,
        }
    }

    /// The ids of `text`. Special tokens written in the text are recognised; nothing is added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .encoder
            .encode_fast(text, false)
            .map_err(|why| TextError::Encode { bytes: text.len(), why: why.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether a text of so many bytes may have no more than `ids` ids. Saying no costs nothing, where counting the
    /// ids of a long text takes its time.
    pub fn may_fit(&self, bytes: usize, ids: usize) -> bool {
        self.most_bytes.is_none_or(|most| bytes <= ids.saturating_mul(most))
    }

    /// The text of `ids`, without the special tokens if `skip_special`. Bytes that are not UTF-8
    /// become U+FFFD, and ids without text become nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| self.tokens.shown(id, skip_special)).copied().collect();
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(broken) => String::from_utf8_lossy(broken.as_bytes()).into_owned(),
        }
    }

    /// A decoder for one stream of ids.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer { tokens: Arc::clone(&self.tokens), skip_special, pending: Vec::new() }
    }

    /// How many tokens there are, added ones included. The model's matrices may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.token_count
    }

    /// The largest id that stands for a text; a larger one must never be sampled.
    pub fn last_text_id(&self) -> u32 {
        self.tokens.special.len() as u32 - 1
    }

    /// The bytes that `id` stands for: whole characters or parts of one; none if it stands for nothing.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.tokens.of(id)
    }

    /// Whether `id` stands for a text.
    pub fn has_text(&self, id: u32) -> bool {
        !self.tokens.of(id).is_empty()
    }

    /// The ids of special tokens, ascending. Tool and think markers are added but not special.
    pub fn special_ids(&self) -> &[u32] {
        &self.special_ids
    }

    /// The id of the token that is written exactly `token`, for example `<|image_pad|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.encoder.token_to_id(token)
    }
}

impl TokenBytes {
    fn new(by_id: &BTreeMap<u32, String>, special_ids: &[u32]) -> TokenBytes {
        let byte_of = byte_of_char();
        let ids = by_id.last_key_value().map_or(0, |(&id, _)| id + 1);
        let mut tokens =
            TokenBytes { bytes: Vec::new(), starts: vec![0], special: vec![false; ids as usize] };
        for id in 0..ids {
            if let Some(text) = by_id.get(&id) {
                let mapped: Option<Vec<u8>> = text.chars().map(|c| byte_of.get(&c).copied()).collect();
                tokens.bytes.extend(mapped.unwrap_or_else(|| text.as_bytes().to_vec()));
            }
            tokens.starts.push(tokens.bytes.len() as u32);
        }
        for &id in special_ids {
            tokens.special[id as usize] = true;
        }
        tokens
    }

    fn of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.starts.get(id..id + 2) {
            Some(&[start, end]) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    fn shown(&self, id: u32, skip_special: bool) -> &[u8] {
        if skip_special && self.special.get(id as usize) == Some(&true) { &[] } else { self.of(id) }
    }
}

/// Most bytes of a text that one id can stand for, if the tokenizer drops nothing.
fn most_bytes(encoder: &tokenizers::Tokenizer, tokens: &TokenBytes) -> Option<usize> {
    /// Composing characters (NFC) makes a text at most this much shorter.
    const COMPOSED: usize = 3;
    let shrinks = match encoder.get_normalizer() {
        None => 1,
        Some(NormalizerWrapper::NFC(_)) => COMPOSED,
        Some(_) => return None,
    };
    // These take the space around them along.
    let greedy = encoder.get_added_tokens_decoder().values().any(|token| token.lstrip || token.rstrip);
    let longest = tokens.starts.windows(2).map(|run| (run[1] - run[0]) as usize).max()?;
    (!greedy).then_some(shrinks * longest)
}

/// Says why a tokenizer would not give a text's own ids, each time the same.
fn refuse_lossy(encoder: &tokenizers::Tokenizer) -> Result<(), &'static str> {
    if encoder.get_truncation().is_some() {
        return Err("it cuts long texts; remove `truncation`");
    }
    if encoder.get_padding().is_some() {
        return Err("it pads short texts; remove `padding`");
    }
    match encoder.get_model() {
        ModelWrapper::BPE(model) if model.dropout.is_some_and(|dropout| dropout > 0.0) => {
            Err("it merges at random; remove `dropout`")
        }
        _ => Ok(()),
    }
}

/// Turns a stream of ids into text, holding back only the bytes of an unfinished character.
///
/// All pushes and the finish, joined, are exactly what [`Tokenizer::decode`] gives for all ids.
pub struct Detokenizer {
    tokens: Arc<TokenBytes>,
    skip_special: bool,
    /// The start of a character whose rest has not come: at most three bytes between pushes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Adds one id and returns the characters that are complete now, often one word, maybe none.
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend_from_slice(self.tokens.shown(id, self.skip_special));
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        while let Err(broken) = std::str::from_utf8(rest) {
            let (good, bad) = rest.split_at(broken.valid_up_to());
            text.push_str(&String::from_utf8_lossy(good));
            rest = bad;
            // No length means that the text ends inside a character, which the next id may complete.
            let Some(bad_bytes) = broken.error_len() else { break };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &bad[bad_bytes..];
        }
        let held_bytes = match std::str::from_utf8(rest) {
            Ok(good) => {
                text.push_str(good);
                0
            }
            Err(_) => rest.len(),
        };
        self.pending.drain(..self.pending.len() - held_bytes);
        text
    }

    /// Ends the stream: a character that never got its last byte becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// The byte that each character of a byte-level vocabulary stands for: printable Latin-1 characters
/// are themselves, and the other bytes, in order, are the characters from U+0100 on.
fn byte_of_char() -> HashMap<char, u8> {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255).filter(|&byte| !is_itself(byte)).zip('\u{100}'..);
    let themselves = (0..=255).filter(|&byte| is_itself(byte)).map(|byte| (byte, char::from(byte)));
    others.chain(themselves).map(|(byte, character)| (character, byte)).collect()
}

/// Why a text could not become tokens, or the tokenizer could not be read.
#[derive(Debug)]
pub enum TextError {
    /// The tokenizer file could not be read.
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The tokenizer file is not one.
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The tokenizer file decodes in a way other than byte-level.
    NotByteLevel {
        /// The file.
        path: PathBuf,
    },
    /// The tokenizer refused a text.
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What it said.
        why: String,
    },
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextError::Read { path, source } => write!(
                f,
                "cannot read the tokenizer {}: {source}; a checkpoint folder needs its tokenizer.json",
                path.display()
            ),
            TextError::Parse { path, why } => write!(
                f,
                "{} is not a tokenizer file: {why}; copy it again from the model's repository",
                path.display()
            ),
            TextError::NotByteLevel { path } => write!(
                f,
                "{} has no ByteLevel decoder, the only one read here; use the model's own tokenizer.json",
                path.display()
            ),
            TextError::Encode { bytes, why } => {
                write!(f, "cannot tokenise a text of {bytes} bytes: {why}; shorten or change the text")
            }
        }
    }
}

impl std::error::Error for TextError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            TextError::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}
