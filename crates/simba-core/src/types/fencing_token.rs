use std::fmt;

/// A number that increases with every acquisition of a mutex, so that a resource can reject a stale holder.
///
/// No lease can stop a holder that is paused right after it checked its lease. A resource that stores
/// the greatest token of all writes and rejects smaller ones can.
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
    /// Creates a token from the store's number.
    #[must_use]
    pub const fn new(token: u64) -> Self {
        Self(token)
    }

    /// Returns the number to pass to the resource.
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
