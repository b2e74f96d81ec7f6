//! The connection that looks for those who wait, connections for operators, and what was learnt of the table.

use std::sync::{Arc, OnceLock};

use simba_core::Result;
use tokio::sync::Mutex;

use crate::error::closed;
use crate::link::{Link, Purpose};
use crate::shape::Shape;
use crate::site::Site;

/// The poller's connection and the shape of the table.
pub(crate) struct Control {
    site: Arc<Site>,
    pub(crate) link: Arc<Mutex<Link>>,
    shape: OnceLock<Shape>,
}

impl Control {
    pub(crate) fn new(site: Arc<Site>) -> Self {
        let link = Link::new(Arc::clone(&site), Purpose::Looks);
        Self { site, link: Arc::new(Mutex::new(link)), shape: OnceLock::new() }
    }

    /// Opens a connection for one operator's call, which may take seconds: on the poller's nobody who waits would be
    /// woken meanwhile.
    ///
    /// # Errors
    ///
    /// There is no connection, and why.
    pub(crate) async fn operator(&self) -> Result<Link> {
        let mut link = Link::new(Arc::clone(&self.site), Purpose::Looks);
        link.ready().await?;
        Ok(link)
    }

    /// The shape of the table, looked at until it is right.
    ///
    /// # Errors
    ///
    /// There is no such table, or it is not Simba's.
    pub(crate) async fn shape(self: &Arc<Self>) -> Result<Shape> {
        if let Some(shape) = self.shape.get() {
            return Ok(*shape);
        }
        let control = Arc::clone(self);
        // A caller with little patience gets it at the next try, since the look goes on without it.
        let look = tokio::spawn(async move {
            let mut link = control.link.lock().await;
            link.ready().await?;
            let shape = Shape::read(&mut link, &control.site).await?;
            Ok(*control.shape.get_or_init(|| shape))
        });
        look.await.unwrap_or_else(|_| Err(closed()))
    }
}
