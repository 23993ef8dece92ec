//! A streamed reply: server-sent events, sent as tokens come. What is there when the client can take more goes out in one
//! write.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use runtime::tokenizer::Tokenizer;
use tokio::time::{Instant, Sleep};

use super::choices::Choices;
use super::chunks::Writer;
use super::state::{Active, App};
use super::wire::Form;

/// The body of a streamed answer.
pub(crate) struct Stream {
    choices: Option<Choices>,
    writer: Writer,
    app: Arc<App>,
    quiet: Pin<Box<Sleep>>,
    /// How long it may be silent; zero is for ever.
    patience: Duration,
    said: Instant,
    _active: Active,
}

impl Stream {
    pub(crate) fn new(
        app: &Arc<App>,
        choices: Choices,
        form: Form,
        include_usage: bool,
        tokenizer: Arc<Tokenizer>,
        active: Active,
    ) -> Stream {
        let writer = Writer::new(form, choices.count(), include_usage, tokenizer);
        Stream {
            choices: Some(choices),
            writer,
            quiet: Box::pin(tokio::time::sleep(app.settings.keep_alive)),
            patience: app.settings.keep_alive,
            said: Instant::now(),
            app: app.clone(),
            _active: active,
        }
    }

    /// Writes what there is.
    fn write(&mut self, context: &mut Context<'_>) {
        let Some(choices) = &mut self.choices else { return };
        match choices.poll(context) {
            Poll::Pending => return,
            Poll::Ready(Ok(steps)) => {
                steps.into_iter().for_each(|step| self.writer.step(step));
                if !choices.is_over() {
                    return;
                }
                self.writer.done();
            }
            Poll::Ready(Err(trouble)) => self.writer.error(&trouble.told(&self.app)),
        }
        self.choices = None;
    }

    /// Writes a comment if nothing was said for long.
    fn keep_alive(&mut self, context: &mut Context<'_>) {
        while !self.patience.is_zero() && self.quiet.as_mut().poll(context).is_ready() {
            if self.said.elapsed() >= self.patience {
                self.writer.out.extend_from_slice(b": keep-alive\n\n");
                self.said = Instant::now();
            }
            let next = self.said + self.patience;
            self.quiet.as_mut().reset(next);
        }
    }
}

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        // What was taken may have nothing to show: then there may be more, and if not, the waker is set.
        loop {
            let open = this.choices.is_some();
            let taken = this.writer.taken;
            this.write(context);
            if !this.writer.out.is_empty() {
                break;
            }
            if this.choices.is_none() && !open {
                return Poll::Ready(None);
            }
            if this.writer.taken == taken {
                this.keep_alive(context);
                if this.writer.out.is_empty() {
                    return Poll::Pending;
                }
                break;
            }
        }
        this.said = Instant::now();
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(std::mem::take(&mut this.writer.out))))))
    }

    fn is_end_stream(&self) -> bool {
        self.choices.is_none() && self.writer.out.is_empty()
    }
}
