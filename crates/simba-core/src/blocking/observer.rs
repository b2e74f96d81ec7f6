use std::sync::Arc;

use super::engine::Engine;
use super::wait;
use crate::error::{Error, Result};
use crate::observer::View;

/// Watches the owner of one mutex. See [`crate::Observer`].
#[derive(Debug)]
#[must_use = "dropping it ends the watch"]
pub struct Observer {
    inner: crate::Observer,
    _engine: Arc<Engine>,
}

impl Observer {
    pub(super) fn new(inner: crate::Observer, engine: Arc<Engine>) -> Self {
        Self { inner, _engine: engine }
    }

    /// What is known now.
    #[must_use]
    pub fn view(&self) -> View {
        self.inner.view()
    }

    /// What went wrong in the last look; `None` once one succeeds.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.inner.last_error()
    }

    /// Waits for a change since the last call.
    ///
    /// # Errors
    ///
    /// As for [`crate::Observer::changed`].
    pub fn changed(&mut self) -> Result<View> {
        wait(self.inner.changed())
    }
}
