//! The error type of all crates: opaque, with a kind to match on and with context for a person.

use std::borrow::Cow;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use crate::types::{ContenderId, Loss, MutexName};

/// A result whose error is [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error, coarse enough to decide what to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's input is wrong: a name, an id, a duration, a URL, a cron expression. Permanent.
    Invalid,
    /// The store or its schema is not set up as needed. Permanent until the setup is fixed.
    Config,
    /// The store denied access: credentials or rights. Permanent until they are fixed.
    Denied,
    /// The store cannot be reached or did not answer in time. Transient.
    Unavailable,
    /// The store has data or sent an answer that is not Simba's. Permanent until the store is fixed.
    Protocol,
    /// The caller's timeout has passed, and another contender holds the mutex.
    Timeout,
    /// The mutex was lost while the operation needed it.
    Lost,
    /// The locker already holds or waits for its mutex; it is not re-entrant.
    Reentered,
    /// The handle was stopped or shut down.
    Closed,
}

impl ErrorKind {
    /// Returns a short lower-case name for logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Config => "config",
            Self::Denied => "denied",
            Self::Unavailable => "unavailable",
            Self::Protocol => "protocol",
            Self::Timeout => "timeout",
            Self::Lost => "lost",
            Self::Reentered => "reentered",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error of any Simba crate.
///
/// Match on [`kind`](Self::kind); print it with its [`source`](StdError::source) chain. `Display` names
/// the backend and the mutex and does not repeat the source. No message holds a secret.
///
/// # Examples
///
/// ```
/// use simba_core::{ErrorKind, MutexName};
///
/// let error = MutexName::new("no/slash").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Invalid);
/// assert!(!error.is_transient());
/// ```
#[derive(Clone)]
pub struct Error {
    inner: Arc<Inner>,
}

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    backend: Option<&'static str>,
    mutex: Option<MutexName>,
    holder: Option<ContenderId>,
    loss: Option<Loss>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// Creates an error of this kind. The message is lower case, without a full stop, and says what to do.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        let (backend, mutex, holder, loss, source) = (None, None, None, None, None);
        Self {
            inner: Arc::new(Inner { kind, message: message.into(), backend, mutex, holder, loss, source }),
        }
    }

    /// Creates an error for bad input: [`ErrorKind::Invalid`].
    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Creates an error for the end of a tenure: [`ErrorKind::Lost`].
    pub(crate) fn lost(loss: Loss) -> Self {
        let mut error = Self::new(ErrorKind::Lost, format!("the mutex is lost: {loss}"));
        Arc::make_mut(&mut error.inner).loss = Some(loss);
        error
    }

    /// Sets the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Arc::make_mut(&mut self.inner).source = Some(Arc::from(source.into()));
        self
    }

    /// Sets the backend, unless it is set already.
    #[must_use]
    pub fn with_backend(mut self, backend: &'static str) -> Self {
        if self.inner.backend.is_none() {
            Arc::make_mut(&mut self.inner).backend = Some(backend);
        }
        self
    }

    /// Sets the mutex, unless it is set already.
    #[must_use]
    pub fn with_mutex(mut self, mutex: &MutexName) -> Self {
        if self.inner.mutex.is_none() {
            Arc::make_mut(&mut self.inner).mutex = Some(mutex.clone());
        }
        self
    }

    /// Sets the holder of the mutex.
    #[must_use]
    pub fn with_holder(mut self, holder: ContenderId) -> Self {
        Arc::make_mut(&mut self.inner).holder = Some(holder);
        self
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// Returns whether the same call may succeed later without a change by a person.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        self.inner.kind == ErrorKind::Unavailable
    }

    /// Returns the name of the backend, as in [`Backend::name`](crate::spi::Backend::name).
    #[must_use]
    pub fn backend(&self) -> Option<&'static str> {
        self.inner.backend
    }

    /// Returns the mutex.
    #[must_use]
    pub fn mutex(&self) -> Option<&MutexName> {
        self.inner.mutex.as_ref()
    }

    /// Returns the holder of the mutex at the time of a refusal.
    #[must_use]
    pub fn holder(&self) -> Option<&ContenderId> {
        self.inner.holder.as_ref()
    }

    /// Returns why the tenure ended, if this is an error of kind [`ErrorKind::Lost`].
    #[must_use]
    pub fn loss(&self) -> Option<&Loss> {
        self.inner.loss.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { backend, message, mutex, holder, .. } = &*self.inner;
        if let Some(backend) = backend {
            write!(f, "{backend}: ")?;
        }
        f.write_str(message)?;
        match (mutex, holder) {
            (Some(mutex), Some(holder)) => write!(f, " (mutex `{mutex}`, held by `{holder}`)"),
            (Some(mutex), None) => write!(f, " (mutex `{mutex}`)"),
            (None, Some(holder)) => write!(f, " (held by `{holder}`)"),
            (None, None) => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, message, backend, mutex, holder, loss, source } = &*self.inner;
        f.debug_struct("Error")
            .field("kind", kind)
            .field("message", message)
            .field("backend", backend)
            .field("mutex", mutex)
            .field("holder", holder)
            .field("loss", loss)
            .field("source", source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.inner.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_backend_mutex_and_holder_but_not_the_source() {
        let error = Error::new(ErrorKind::Timeout, "still held after 2s")
            .with_source(std::io::Error::other("the cause"))
            .with_backend("redis")
            .with_mutex(&MutexName::new("orders").unwrap())
            .with_holder(ContenderId::new("a@b").unwrap());
        assert_eq!(error.to_string(), "redis: still held after 2s (mutex `orders`, held by `a@b`)");
        assert_eq!(error.source().unwrap().to_string(), "the cause");
    }

    #[test]
    fn first_backend_is_kept() {
        let error = Error::new(ErrorKind::Denied, "no").with_backend("redis").with_backend("memory");
        assert_eq!(error.backend(), Some("redis"));
    }

    #[test]
    fn only_unavailable_is_transient() {
        assert!(Error::new(ErrorKind::Unavailable, "gone").is_transient());
        for kind in [ErrorKind::Invalid, ErrorKind::Config, ErrorKind::Denied, ErrorKind::Protocol] {
            assert!(!Error::new(kind, "x").is_transient());
        }
    }
}
