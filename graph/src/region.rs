//! Labelled layout before any allocation: names and sizes become offsets, so that an error can name a span.

use crate::Ptr;

/// Every span starts at a multiple of this many bytes.
pub const SPAN_ALIGN: usize = 256;

/// A layout under construction: labelled spans, one after another.
#[derive(Clone, Debug, Default)]
pub struct Region {
    spans: Vec<Labelled>,
    bytes: usize,
}

#[derive(Clone, Debug)]
struct Labelled {
    label: String,
    span: Span,
}

/// A run of bytes inside a region, by offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Bytes from the start of the region.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Span {
    /// The address of this span in a region that lies at `base`.
    pub fn at<T>(&self, base: Ptr<u8>) -> Ptr<T> {
        base.byte_add(self.offset).cast()
    }
}

impl Region {
    /// An empty region.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a span of `bytes` bytes.
    pub fn add(&mut self, label: impl Into<String>, bytes: usize) -> Span {
        let span = Span { offset: self.bytes, bytes };
        self.bytes += bytes.next_multiple_of(SPAN_ALIGN);
        self.spans.push(Labelled { label: label.into(), span });
        span
    }

    /// Adds a span of `count` values of `T`.
    pub fn array<T>(&mut self, label: impl Into<String>, count: usize) -> Span {
        self.add(label, count * size_of::<T>())
    }

    /// Size of the whole region, a multiple of [`SPAN_ALIGN`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Label and span of everything added, in order.
    pub fn spans(&self) -> impl Iterator<Item = (&str, Span)> {
        self.spans.iter().map(|l| (l.label.as_str(), l.span))
    }
}
