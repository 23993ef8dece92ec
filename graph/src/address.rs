//! Device addresses: plain numbers with a type, as argument blocks hold them.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

/// The address of `T`s in device (or pinned) memory. Eight bytes, no ownership, no validity promise:
/// the device checks it when work runs.
#[repr(transparent)]
pub struct Ptr<T: 'static>(u64, PhantomData<T>);

// SAFETY: a transparent wrapper of a u64 beside a zero-sized PhantomData; every bit pattern is a valid u64.
unsafe impl<T: 'static> Zeroable for Ptr<T> {}
// SAFETY: as above; no padding, Copy, 'static.
unsafe impl<T: 'static> Pod for Ptr<T> {}

impl<T> Ptr<T> {
    /// The address that points nowhere. Reading or writing it is a fault.
    pub const NULL: Ptr<T> = Ptr(0, PhantomData);

    /// The pointer with this number.
    pub const fn new(address: u64) -> Self {
        Ptr(address, PhantomData)
    }

    /// The number.
    pub const fn address(self) -> u64 {
        self.0
    }

    /// Whether this is [`Ptr::NULL`].
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The same address, read as `U`s.
    pub const fn cast<U>(self) -> Ptr<U> {
        Ptr(self.0, PhantomData)
    }

    /// The address `bytes` further on.
    pub const fn byte_add(self, bytes: usize) -> Self {
        Ptr(self.0 + bytes as u64, PhantomData)
    }

    /// The address of element `index`.
    pub const fn at(self, index: usize) -> Self {
        self.byte_add(index * size_of::<T>())
    }
}

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ptr<T> {}

impl<T> PartialEq for Ptr<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for Ptr<T> {}

impl<T> Default for Ptr<T> {
    fn default() -> Self {
        Ptr::NULL
    }
}

impl<T> fmt::Debug for Ptr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "@{:x}", self.0)
    }
}
