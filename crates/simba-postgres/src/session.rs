//! The session of one contender or observer.

use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::{Answer, Claim, Holding, Intent, Ownership, Prior, Session, async_trait};
use simba_core::{Error, Moment, Result};
use tokio_postgres::Row;

use crate::backend::{LockedRetry, Shared};
use crate::batch::{Kind, Numbers, Request};
use crate::connection::Param;
use crate::statements::{HolderRow, Query, get, time_until, token};
use crate::supervisor::{Task, leave};
use crate::wakeups::{Push, SessionWakeups};

/// Maximum number of attempts in one call for a mutex that was just free.
const TRIES: u32 = 3;

/// How long a new queue entry lasts while its handle is not subscribed yet: nothing shows that the waiter is alive. If
/// the subscription does not come, the entry is renewed after half of this time, and then lasts as long as any other.
const PROVISIONAL: Duration = Duration::from_secs(2);

/// Stands for no token in parameters.
const NO_TOKEN: i64 = -1;

pub(crate) struct PostgresSession {
    shared: Arc<Shared>,
    claim: Claim,
    /// Distinguishes the sessions of the handle, also those with the same contender id.
    number: u64,
    /// Whether the queue may have an entry of this session.
    queued: bool,
    /// When an entry that lasts for [`PROVISIONAL`] has to be renewed.
    provisional: Option<Moment>,
    /// The token of the last tenure.
    token: i64,
    holds: bool,
    /// Whether the mutex had a waiter at the last acquisition or renewal.
    waited: bool,
    /// Boxed, since a holder has none.
    wakeups: Option<Box<SessionWakeups>>,
}

/// The outcome of one attempt to acquire or renew.
enum Attempt {
    Answered(Answer),
    /// The mutex became free meanwhile.
    Free,
    /// The mutex may have no row yet.
    NoRow,
    /// Another transaction has locked the row.
    Locked,
}

impl PostgresSession {
    pub(crate) fn new(shared: Arc<Shared>, claim: Claim) -> Self {
        let number = shared.notifications.number();
        Self {
            shared,
            claim,
            number,
            queued: false,
            provisional: None,
            token: NO_TOKEN,
            holds: false,
            waited: false,
            wakeups: None,
        }
    }

    /// Returns the session's name in the tables. It is built on demand, to keep sessions small.
    fn session(&self) -> Arc<str> {
        self.shared.notifications.session(self.number).into()
    }

    async fn contend_with(&mut self, prior: Prior) -> Result<Answer> {
        let lapsed = match prior {
            Prior::Lapsed(token) => i64::try_from(token.get()).unwrap_or(NO_TOKEN),
            _ => NO_TOKEN,
        };
        // A renewal never acquires: it may arrive after the release that followed it.
        let kind = if prior == Prior::Held { Kind::Renew } else { Kind::Take };
        let (mut tries, mut has_row, mut locked) = (0, false, LockedRetry::new(&self.shared.settings));
        loop {
            match self.attempt(lapsed, kind, has_row).await? {
                Attempt::Answered(answer) => return Ok(answer),
                Attempt::Free if tries == TRIES - 1 => return Ok(Answer::Vacant),
                Attempt::Free => tries += 1,
                Attempt::NoRow if !has_row && self.create().await? => has_row = true,
                Attempt::NoRow | Attempt::Locked => locked.pause(&*self.shared.settings.clock).await?,
            }
        }
    }

    /// Creates the row of a new mutex. Returns false if another transaction is inserting it.
    async fn create(&self) -> Result<bool> {
        let mutexes = [self.claim.mutex.as_str()];
        Ok(self.shared.call_unless_locked(Query::Create, &[&mutexes.as_slice()]).await?.is_some())
    }

    async fn attempt(&mut self, lapsed: i64, kind: Kind, has_row: bool) -> Result<Attempt> {
        let takes = kind != Kind::Renew;
        if takes && self.queued {
            return self.poll(lapsed).await;
        }
        let taken = self.shared.batched(&self.shared.takes, self.request(lapsed, kind)).await?;
        if let Some(numbers) = taken {
            return self.acquired(numbers).map(Attempt::Answered);
        }
        match self.claim.intent {
            Intent::Queue if takes && !has_row && self.shared.notifications.push() == Push::Down => {
                // A mutex without a row is acquired without a subscription.
                Ok(Attempt::NoRow)
            }
            Intent::Queue if takes => self.queue().await,
            _ => self.inspect_after_take(takes, lapsed).await,
        }
    }

    /// Reads the holder after a request that found no row, or no row that it could lock.
    async fn inspect_after_take(&mut self, takes: bool, lapsed: i64) -> Result<Attempt> {
        match self.holder().await? {
            None if takes => Ok(Attempt::NoRow),
            None => Ok(Attempt::Answered(Answer::Vacant)),
            // A free mutex may be promised to a waiter, which only a poll finds out.
            Some(holder) if holder.is_free() && takes => self.poll(lapsed).await,
            Some(holder) if !holder.is_free() && holder.session == *self.session() => Ok(Attempt::Locked),
            Some(holder) => holder.answer().map(Attempt::Answered),
        }
    }

    /// Records the acquisition or renewal that the columns of a row report.
    fn acquired(&mut self, [number, watched, waited, _]: Numbers) -> Result<Answer> {
        self.record_token(number, watched);
        self.waited = waited > 0;
        // A full lease; the server counts it from a moment after the call was made.
        let (owner, total) = (self.claim.contender.clone(), self.claim.lease.total());
        Ok(Answer::Ours(Ownership::new(owner, Some(token(number)?), total)))
    }

    fn request(&self, token: i64, kind: Kind) -> Request {
        Request {
            mutex: self.claim.mutex.clone(),
            owner: self.claim.contender.clone(),
            session: self.session(),
            ttl: self.claim.lease.ttl().as_secs_f64(),
            total: self.claim.lease.total().as_secs_f64(),
            token,
            kind,
        }
    }

    /// Acquires the mutex if it is this waiter's turn. Otherwise renews the queue entry if necessary.
    async fn poll(&mut self, lapsed: i64) -> Result<Attempt> {
        let Request { mutex, owner, session, ttl, total, .. } = &self.request(lapsed, Kind::Take);
        let params: [Param<'_>; 6] = [&mutex.as_str(), &owner.as_str(), &&**session, ttl, total, &lapsed];
        let Some(rows) = self.shared.call_unless_locked(Query::Poll, &params).await? else {
            return Ok(Attempt::Locked);
        };
        let queues = self.claim.intent == Intent::Queue;
        let row = match rows.first() {
            Some(row) => row,
            None if queues => return self.queue().await,
            None => return Ok(Attempt::Free),
        };
        let holder = HolderRow::read(row)?;
        if let Some(watched) = get(row, 6)? {
            self.queued = false;
            self.waited = true;
            self.record_token(holder.token, watched);
            return Ok(Attempt::Answered(Answer::Ours(holder.ownership()?)));
        }
        if get(row, 8)? {
            return Ok(Attempt::Locked);
        }
        let (now, end, channel): (_, Option<_>, Option<&str>) = (get(row, 4)?, get(row, 5)?, get(row, 7)?);
        let is_current = end.is_some_and(|end| time_until(end, now) > self.entry_ttl() / 2)
            && channel == Some(self.shared.notifications.entry_channel());
        if queues && !is_current {
            return self.queue().await;
        }
        holder.answer().map(Attempt::Answered)
    }

    /// Creates or renews the queue entry. The mutex may be free: then it may be this waiter's turn.
    async fn queue(&mut self) -> Result<Attempt> {
        // A new entry waits for the subscription, so that it shows from the start whether this process is alive. An
        // existing entry is renewed immediately, since other waiters may skip it.
        let limit = self.claim.lease.ttl() / 6;
        let subscribed = self.queued || self.shared.notifications.wait_subscribed(limit).await;
        let was_queued = std::mem::replace(&mut self.queued, true);
        let (mutex, owner) = (self.claim.mutex.as_str(), self.claim.contender.as_str());
        self.provisional = (!subscribed).then(|| self.shared.settings.clock.now() + PROVISIONAL / 2);
        let entry = if subscribed { self.entry_ttl() } else { self.entry_ttl().min(PROVISIONAL) };
        let (channel, entry) = (self.shared.notifications.entry_channel(), entry.as_secs_f64());
        let params: [Param<'_>; 5] = [&mutex, &owner, &&*self.session(), &channel, &entry];
        let (attempt, is_placed) =
            match self.shared.call_unless_locked(Query::Queue, &params).await?.as_deref() {
                None => (Attempt::Locked, false),
                Some([]) => (Attempt::NoRow, false),
                Some([row, ..]) => self.joined(row)?,
            };
        self.queued = was_queued || is_placed;
        Ok(attempt)
    }

    /// Returns what the statement that joins the queue found, and whether it made an entry.
    fn joined(&mut self, row: &Row) -> Result<(Attempt, bool)> {
        let holder = HolderRow::read(row)?;
        if get(row, 5)? {
            return Ok((Attempt::Locked, false));
        }
        if holder.is_free() {
            return Ok((Attempt::Free, true));
        }
        if holder.session == *self.session() {
            // The row was locked when this call tried to renew or replace the hold.
            return Ok((Attempt::Locked, false));
        }
        self.waited = true;
        let ownership = holder.ownership()?;
        let is_placed = ownership.owner != self.claim.contender;
        Ok((Attempt::Answered(Answer::Held(ownership)), is_placed))
    }

    /// Releases what the session holds under this token.
    async fn free(&self, token: i64) -> Result<()> {
        let mut locked = LockedRetry::new(&self.shared.settings);
        let uncontended = token != NO_TOKEN && !self.waited;
        let kind = if uncontended { Kind::ReleaseUncontended } else { Kind::Release };
        loop {
            let request = self.request(token, kind);
            if let Some(numbers) = self.shared.batched(&self.shared.releases, request).await? {
                self.released(numbers);
                return Ok(());
            }
            if !self.may_release(token).await? {
                return Ok(());
            }
            locked.pause(&*self.shared.settings.clock).await?;
        }
    }

    /// Notifies the waiters and watchers that the statement of a release did not notify.
    fn released(&self, [waited, waited_before, notified, watched]: Numbers) {
        // Before this call locked the row, the notified waiter may have left, or the first waiter may have joined.
        if waited > 0 && (notified == 0 || waited != waited_before) {
            self.shared.start(Task::Wake(self.claim.mutex.clone()));
        } else {
            self.notify_watchers(watched);
        }
    }

    /// Returns whether a release has something to release, so that only a lock can have prevented it.
    async fn may_release(&self, token: i64) -> Result<bool> {
        let Some(holder) = self.holder().await? else { return Ok(false) };
        let is_ours = holder.session == *self.session() && (token == NO_TOKEN || holder.token == token);
        Ok(is_ours || (token == NO_TOKEN && holder.is_free()))
    }

    /// Reads the last holder. Returns `None` if the mutex has no row.
    async fn holder(&self) -> Result<Option<HolderRow>> {
        let rows = self.shared.call(Query::Inspect, &[&self.claim.mutex.as_str()]).await?;
        rows.first().map(HolderRow::read).transpose()
    }

    /// Records the token of the tenure. A new token is a change of owner.
    fn record_token(&mut self, token: i64, watched: i64) {
        if std::mem::replace(&mut self.token, token) != token {
            self.notify_watchers(watched);
        }
    }

    /// Notifies the watchers of the mutex, if it may have any.
    fn notify_watchers(&self, watched: i64) {
        if watched > 0 {
            self.shared.start(Task::Wake(self.claim.mutex.clone()));
        }
    }

    /// Deletes the queue entry, and passes a wakeup on.
    async fn leave(&mut self) -> Result<()> {
        let (mutex, session) = (self.claim.mutex.clone(), self.session());
        match leave(&self.shared, &mutex, &session).await? {
            Some(true) => self.shared.start(Task::Wake(mutex)),
            Some(false) => {}
            None => self.shared.start(Task::Leave { mutex, session }),
        }
        self.queued = false;
        Ok(())
    }

    /// Adds the mutex to an error.
    fn name(&self, error: Error) -> Error {
        error.with_mutex(&self.claim.mutex)
    }

    /// Returns how long a queue entry lasts: at least two polls.
    fn entry_ttl(&self) -> Duration {
        (self.claim.lease.poll() * 2).max(self.claim.lease.ttl())
    }

    /// Waits for a wakeup. The first one reports that the session is subscribed.
    async fn wait_changed(&mut self) -> Result<()> {
        let notifications = &self.shared.notifications;
        let subscribe = || Box::new(SessionWakeups::new(notifications, self.number, &self.claim));
        let notified = self.wakeups.get_or_insert_with(subscribe).notified(notifications);
        let notified = match self.provisional {
            None => notified.await,
            Some(end) => tokio::select! {
                biased;
                notified = notified => notified,
                // The next call renews the entry before it ends.
                () = self.shared.settings.clock.sleep_until(end) => Ok(()),
            },
        };
        if notified.is_err() {
            self.wakeups = None;
        }
        if self.provisional.take().is_some() { Ok(()) } else { notified }
    }
}

#[async_trait]
impl Session for PostgresSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let answer = self.contend_with(prior).await.map_err(|error| self.name(error))?;
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // A holder needs no wakeups.
            self.wakeups = None;
        } else if answer == Answer::Vacant && self.queued {
            // The waiter before this one may die before it acquires, without a notification to this one.
            self.shared.notifications.recheck(self.number);
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let holder = self.holder().await.map_err(|error| self.name(error))?;
        holder.filter(|holder| !holder.is_free()).map(HolderRow::ownership).transpose()
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        let token = match holding {
            Holding::Nothing => None,
            // A token outside the range of the column matches no row.
            Holding::Under(token) => Some(i64::try_from(token.get()).unwrap_or(i64::MAX)),
            _ => Some(NO_TOKEN),
        };
        if let Some(token) = token {
            self.free(token).await.map_err(|error| self.name(error))?;
        }
        if self.queued {
            self.leave().await.map_err(|error| self.name(error))?;
        }
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        // Boxed to keep the holder's future small.
        Box::pin(self.wait_changed()).await
    }
}

impl Drop for PostgresSession {
    fn drop(&mut self) {
        if self.queued {
            let (mutex, session) = (self.claim.mutex.clone(), self.session());
            self.shared.start(Task::Leave { mutex, session });
        }
    }
}
