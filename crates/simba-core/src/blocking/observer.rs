use std::sync::Arc;

use super::engine::Engine;
use super::wait;
use crate::delegate::delegate;
use crate::error::{Error, Result};
use crate::observer::View;
use crate::types::MutexName;

/// Watches the owner of one mutex. See [`crate::Observer`].
#[derive(Debug)]
#[must_use = "dropping it ends the observation"]
pub struct Observer {
    pub(super) inner: crate::Observer,
    pub(super) _engine: Arc<Engine>,
}

impl Observer {
    delegate! {
        inner {
            /// Returns the mutex.
            fn mutex(&self) -> &MutexName;

            /// Returns what is known now.
            fn view(&self) -> View;

            /// Returns the error of the last poll; `None` if it succeeded.
            fn last_error(&self) -> Option<Error>;
        }
    }

    /// Waits for a change since the last call, and returns what is known now.
    ///
    /// # Errors
    ///
    /// As for [`crate::Observer::changed`].
    pub fn changed(&mut self) -> Result<View> {
        wait(self.inner.changed())
    }
}
