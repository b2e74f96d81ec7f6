//! Looks at the table on behalf of all who wait or watch: one statement, however many they are.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::Value;
use simba_core::{MutexName, Result};
use tokio::sync::Mutex;

use crate::error::NAME;
use crate::link::Link;
use crate::pace::Pace;
use crate::site::Site;
use crate::statements::LOOK;

const LIMIT: Duration = Duration::from_secs(1);

/// The one task of a handle that polls, and only while someone listens.
pub(crate) struct Poller {
    site: Arc<Site>,
    control: Arc<Mutex<Link>>,
    pace: Pace,
    /// The connection that the last look was made on.
    epoch: u64,
}

impl Poller {
    pub(crate) fn new(site: Arc<Site>, control: Arc<Mutex<Link>>) -> Self {
        let pace = Pace::new(site.config.poll, site.clock.now());
        Self { site, control, pace, epoch: 1 }
    }

    /// Polls until it is aborted.
    pub(crate) async fn run(mut self) {
        let site = Arc::clone(&self.site);
        loop {
            let now = site.clock.now();
            let Some(plan) = site.waiters.plan(now) else {
                site.waiters.demand().await;
                continue;
            };
            let at = self.pace.next(now, &plan);
            tokio::select! {
                biased;
                () = site.clock.sleep_until(at) => {}
                () = site.waiters.demand() => continue,
            }
            self.pace.spend(site.clock.now());
            if let Err(error) = self.look().await {
                tracing::debug!(backend = NAME, %error, "a look failed");
            }
        }
    }

    async fn look(&mut self) -> Result<()> {
        let control = Arc::clone(&self.control);
        let mut link = control.lock().await;
        link.ready().await?;
        if link.epoch() != self.epoch {
            // Anything may have been missed.
            self.epoch = link.epoch();
            self.site.waiters.ring_all();
        }
        let topics = self.site.waiters.topics();
        for some in topics.chunks(LOOK) {
            self.look_at(&mut link, some).await?;
        }
        Ok(())
    }

    async fn look_at(&self, link: &mut Link, asked: &[MutexName]) -> Result<()> {
        let Some(last) = asked.last() else { return Ok(()) };
        let (text, size) = self.site.statements.read_many(asked.len());
        let filled = asked.iter().chain(std::iter::repeat(last)).take(size);
        let values = filled.map(|mutex| Value::from(mutex.as_str())).collect();
        link.prepare(text).await;
        let sent = self.site.clock.now();
        let rows = link.rows(LIMIT, text, values).await.map_err(|fault| fault.into_error())?;
        // Counted from before the look, so that the end of a lease is not expected too late.
        self.site.waiters.saw(asked, &rows, sent);
        Ok(())
    }
}
