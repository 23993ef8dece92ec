//! A body with something beside it that is dropped when the body is.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// A body, and what lives as long as it does.
pub(crate) struct UntilDropped<B, T> {
    body: B,
    _beside: T,
}

impl<B, T> UntilDropped<B, T> {
    pub(crate) fn new(body: B, beside: T) -> UntilDropped<B, T> {
        UntilDropped { body, _beside: beside }
    }
}

impl<B: Body<Data = Bytes> + Unpin, T: Unpin> Body for UntilDropped<B, T> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
