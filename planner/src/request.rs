//! What was asked, as far as planning goes.

use crate::ids::{ClassId, RequestId};

/// One request: how much it wants, and what its rounds must respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Its number, unique among the requests that wait or live.
    pub id: RequestId,
    /// Prompt rows: tokens and picture rows together.
    pub prompt: u32,
    /// Tokens it may produce at most.
    pub max_tokens: u32,
    /// Where its KV lives.
    pub class: ClassId,
    /// Rows it takes in a decode round; a constrained request takes one.
    pub window: u32,
    /// Its prompt holds picture or video rows, so its rounds are eager.
    pub image_bearing: bool,
    /// It uses a pocket, so its rounds are eager.
    pub pocketed: bool,
    /// A grammar masks its tokens, so each token is read before the next row is planned.
    pub constrained: bool,
}

impl Request {
    /// A plain text request of class 0: one row a round, nothing special.
    pub fn text(id: RequestId, prompt: u32, max_tokens: u32) -> Self {
        Self {
            id,
            prompt,
            max_tokens,
            class: ClassId(0),
            window: 1,
            image_bearing: false,
            pocketed: false,
            constrained: false,
        }
    }

    /// Positions that its whole life may need.
    pub fn positions(&self) -> u64 {
        self.prompt as u64 + self.max_tokens as u64
    }
}
