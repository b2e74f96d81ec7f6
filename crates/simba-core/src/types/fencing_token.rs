use std::fmt;

/// A number that grows with every acquisition of a mutex, so that a resource can refuse a stale holder.
///
/// No lease can stop a holder that is paused right after it checked its lease. A resource that remembers
/// the greatest token it has seen and refuses smaller ones can.
///
/// # Examples
///
/// ```
/// use simba_core::FencingToken;
///
/// let (stale, current) = (FencingToken::new(41), FencingToken::new(42));
/// assert!(stale < current);
/// assert_eq!(current.get(), 42);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

impl FencingToken {
    /// Wraps the number that the store gave.
    #[must_use]
    pub const fn new(token: u64) -> Self {
        Self(token)
    }

    /// The number to hand to the resource.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
