//! One call of one session, statement by statement.
//!
//! Every write that speaks of our own hold names the version that it is about, so it does nothing if it comes
//! late or twice.

use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mysql_async::Value;
use simba_core::{Answer, Claim, Error, ErrorKind, FencingToken, Holding, Ownership, Prior, Result};

use crate::decide::{Move, decide};
use crate::error::{Fault, NAME};
use crate::link::{Link, Written};
use crate::row::Row;
use crate::site::Site;
use crate::standing::Standing;

/// How often a call looks again after it lost a race, before it says so.
const ROUNDS: usize = 4;

/// A session as its worker knows it.
#[derive(Debug)]
pub(crate) struct Party {
    pub(crate) claim: Claim,
    standing: Mutex<Standing>,
}

impl Party {
    pub(crate) fn new(claim: Claim) -> Self {
        Self { claim, standing: Mutex::default() }
    }

    pub(crate) fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ttl_ms(&self) -> u64 {
        millis(self.claim.lease.ttl())
    }

    pub(crate) fn total_ms(&self) -> u64 {
        millis(self.claim.lease.ttl()) + millis(self.claim.lease.transition())
    }

    pub(crate) fn mutex(&self) -> Value {
        Value::from(self.claim.mutex.as_str())
    }

    pub(crate) fn id(&self) -> Value {
        Value::from(self.claim.contender.as_str())
    }

    /// The answer after a write that made or renewed our hold. Another can take the row from the millisecond
    /// after the lease on, so the whole lease is ours although the server cuts off what is less than one.
    pub(crate) fn ours(&self, remaining: Duration) -> Result<Answer, Fault> {
        let token = self.standing().token();
        if token.is_none() {
            return Err(Fault::Refused(
                Error::new(ErrorKind::Protocol, "a hold without a version").with_backend(NAME),
            ));
        }
        Ok(Answer::Ours(Ownership::new(self.claim.contender.clone(), token, remaining)))
    }

    pub(crate) fn whole_lease(&self) -> Duration {
        Duration::from_millis(self.total_ms())
    }
}

/// Leases are kept in whole milliseconds at the server.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 4)
}

/// One call under way on a connection.
pub(crate) struct Call<'a> {
    pub(crate) site: &'a Site,
    pub(crate) link: &'a mut Link,
    pub(crate) party: &'a Party,
    /// A take of this very call was not answered: our own id in the row is ours, whatever was before.
    pub(crate) doubt: &'a mut bool,
}

impl Call<'_> {
    /// Takes, renews or reports.
    pub(crate) async fn contend(&mut self, prior: Prior, offer: Option<u64>) -> Result<Answer, Fault> {
        self.not_locked().await?;
        if let Some(answer) = self.at_once(prior, offer).await? {
            return Ok(answer);
        }
        for _ in 0..ROUNDS {
            let Some(row) = self.read().await? else {
                if let Some(answer) = self.create().await? {
                    return Ok(answer);
                }
                continue;
            };
            if let Some(answer) = self.act(prior, &row).await? {
                return Ok(answer);
            }
        }
        Ok(Answer::Vacant)
    }

    /// Asks whether a row that was locked still is, which a write would wait to find out.
    async fn not_locked(&mut self) -> Result<(), Fault> {
        if !self.party.standing().suspect {
            return Ok(());
        }
        let mutex = vec![self.party.mutex()];
        let _: Vec<(u8,)> = self.link.query(self.limit(), &self.site.statements.unlocked, mutex).await?;
        self.party.standing().unlocked();
        self.site.note_unlocked(&self.party.claim.mutex);
        Ok(())
    }

    /// Sends the write that needs no look before it, if there is one: about the hold that we remember, and a take at
    /// the version at which this handle saw the mutex free.
    async fn at_once(&mut self, prior: Prior, offer: Option<u64>) -> Result<Option<Answer>, Fault> {
        let (token, seen, doubtful) = {
            let mut standing = self.party.standing();
            if prior == Prior::Nothing {
                standing.forget();
            }
            (standing.token(), standing.seen(), standing.doubtful())
        };
        match (prior, seen) {
            (Prior::Nothing, _) if *self.doubt => Ok(None),
            (Prior::Nothing, _) => match offer.or_else(|| self.site.take_freed(&self.party.claim.mutex)) {
                Some(version) => self.take(version).await,
                None => Ok(None),
            },
            (Prior::Lapsed(lapsed), Some(seen)) if token == Some(lapsed) => self.retake(seen).await,
            (_, Some(seen)) => match doubtful {
                Some(versions) => self.renew_among(versions).await,
                None => self.renew(seen, true).await,
            },
            (_, None) => Ok(None),
        }
    }

    /// What the row allows; `None` if it changed meanwhile.
    async fn act(&mut self, prior: Prior, row: &Row) -> Result<Option<Answer>, Fault> {
        let prior = if prior == Prior::Nothing && *self.doubt { Prior::Unknown } else { prior };
        let decided = decide(prior, &self.party.standing(), &self.party.claim.contender, row);
        match decided {
            Move::Take => self.take(row.version).await,
            Move::Renew => self.renew(row.version, true).await,
            Move::Adopt => self.renew(row.version, false).await,
            Move::Retake => self.retake(row.version).await,
            Move::Wait => Ok(Some(Answer::Vacant)),
            Move::Yield => self.refuse(row).map(Some),
        }
    }

    fn refuse(&self, row: &Row) -> Result<Answer, Fault> {
        self.party.standing().forget();
        Ok(row
            .ownership()
            .map_err(|error| Fault::Refused(error.with_backend(NAME)))?
            .map_or(Answer::Vacant, Answer::Held))
    }

    /// Takes what was free at this version.
    async fn take(&mut self, version: u64) -> Result<Option<Answer>, Fault> {
        let party = self.party;
        // What begins here has no token before a reply is seen.
        party.standing().forget();
        let values =
            vec![party.ttl_ms().into(), party.total_ms().into(), party.id(), party.mutex(), version.into()];
        match self.write_timed(&self.site.statements.take, values).await {
            Ok(Written { rows: 0, .. }) => Ok(None),
            Ok(_) => self.begin(version + 1).map(Some),
            Err(fault) => {
                *self.doubt |= fault.leaves_doubt();
                Err(fault)
            }
        }
    }

    /// Makes the row of a mutex that nobody ever used, and takes it.
    async fn create(&mut self) -> Result<Option<Answer>, Fault> {
        let made =
            self.link.write(self.limit(), &self.site.statements.insert, vec![self.party.mutex()]).await?;
        if made.rows == 0 {
            return Ok(None);
        }
        self.take(0).await
    }

    /// Renews our hold at this version. If it is not the remembered one, the version after it is its token.
    async fn renew(&mut self, version: u64, keep: bool) -> Result<Option<Answer>, Fault> {
        {
            let mut standing = self.party.standing();
            if keep { standing.sent() } else { standing.forget() }
        }
        let written = self.extend(&self.site.statements.renew, version).await;
        let mut standing = self.party.standing();
        match &written {
            Ok(written) if written.rows > 0 && keep => standing.renewed(version + 1),
            Ok(written) if written.rows > 0 => standing.began(version + 1),
            Err(fault) if fault.leaves_doubt() => {}
            _ if keep => standing.missed(),
            _ => {}
        }
        drop(standing);
        match written?.rows {
            0 => Ok(None),
            _ => self.party.ours(self.party.whole_lease()).map(Some),
        }
    }

    /// Renews the remembered hold at whichever version our unanswered writes left it: on a slow network there is no
    /// time to ask first.
    async fn renew_among(&mut self, versions: RangeInclusive<u64>) -> Result<Option<Answer>, Fault> {
        let party = self.party;
        party.standing().sent();
        let mut values = vec![party.ttl_ms().into(), party.total_ms().into(), party.mutex(), party.id()];
        values.extend([Value::from(*versions.start()), Value::from(*versions.end())]);
        let written = self.link.write(self.limit(), &self.site.statements.renew_among, values).await;
        let mut standing = party.standing();
        match &written {
            Ok(Written { rows: 1.., number: Some(version), .. }) => standing.renewed(*version),
            Err(fault) if fault.leaves_doubt() => {}
            _ => standing.missed(),
        }
        drop(standing);
        match written?.rows {
            0 => Ok(None),
            _ => party.ours(party.whole_lease()).map(Some),
        }
    }

    /// Begins a new tenure on what is ours already.
    async fn retake(&mut self, version: u64) -> Result<Option<Answer>, Fault> {
        self.party.standing().forget();
        let written = self.extend(&self.site.statements.retake, version).await?;
        match written.rows {
            0 => Ok(None),
            _ => self.begin(version + 1).map(Some),
        }
    }

    async fn extend(&mut self, text: &str, version: u64) -> Result<Written, Fault> {
        let party = self.party;
        let values =
            vec![party.ttl_ms().into(), party.total_ms().into(), party.mutex(), party.id(), version.into()];
        self.write_timed(text, values).await
    }

    /// Carries out a write that hands the server's time over.
    async fn write_timed(&mut self, text: &str, values: Vec<Value>) -> Result<Written, Fault> {
        let written = self.link.write(self.limit(), text, values).await?;
        if let Some(reading) = written.reading() {
            self.site.server_clock.read(reading);
        }
        Ok(written)
    }

    fn begin(&self, version: u64) -> Result<Answer, Fault> {
        let Claim { mutex, contender, .. } = &self.party.claim;
        self.party.standing().began(version);
        self.site.note_version(mutex, version);
        self.site.waiters.took(mutex, contender.as_str());
        self.party.ours(self.party.whole_lease())
    }

    /// Reports who owns the mutex.
    pub(crate) async fn inspect(&mut self) -> Result<Option<Ownership>, Fault> {
        let Some(row) = self.read().await? else { return Ok(None) };
        row.ownership().map_err(|error| Fault::Refused(error.with_backend(NAME)))
    }

    /// Frees what `holding` says.
    pub(crate) async fn release(&mut self, holding: Holding) -> Result<(), Fault> {
        let mut known = match holding {
            Holding::Under(token) => match self.remembered(token) {
                Some(seen) => Some(seen),
                None => return Ok(()),
            },
            Holding::Unknown => None,
            _ => return Ok(()),
        };
        self.not_locked().await?;
        for _ in 0..ROUNDS {
            let done = match known.take() {
                Some(version) => self.free(version).await?,
                None => self.free_ours(holding).await?,
            };
            if done {
                return Ok(());
            }
        }
        let message = "the row changes faster than it can be freed";
        Err(Fault::Refused(Error::new(ErrorKind::Unavailable, message).with_backend(NAME)))
    }

    /// Frees the row if it is ours: any row under our id, or the tenure that our own writes explain. False if the row
    /// changed meanwhile.
    async fn free_ours(&mut self, holding: Holding) -> Result<bool, Fault> {
        let row = self.read().await?;
        let unknown = holding == Holding::Unknown;
        let is_ours = |row: &Row| {
            let meant = unknown || self.party.standing().explains(row.version);
            row.owner == self.party.claim.contender.as_str() && meant
        };
        match row {
            Some(row) if is_ours(&row) => return self.free(row.version).await,
            // A take of ours may still be under way: it must not find the row as it expects it.
            Some(row) if unknown && row.is_free() => return self.fence(row.version).await,
            _ => {}
        }
        self.party.standing().forget();
        Ok(true)
    }

    async fn fence(&mut self, version: u64) -> Result<bool, Fault> {
        let values = vec![self.party.mutex(), version.into()];
        let written = self.link.write(self.limit(), &self.site.statements.fence, values).await?;
        self.party.standing().forget();
        Ok(written.rows > 0)
    }

    fn remembered(&self, token: FencingToken) -> Option<u64> {
        let standing = self.party.standing();
        standing.seen().filter(|_| standing.token() == Some(token))
    }

    async fn free(&mut self, version: u64) -> Result<bool, Fault> {
        let party = self.party;
        party.standing().sent();
        let values = vec![party.mutex(), party.id(), version.into()];
        let written = self.link.write(self.limit(), &self.site.statements.release, values).await;
        let mut standing = party.standing();
        match &written {
            Ok(written) if written.rows > 0 => standing.forget(),
            Err(fault) if fault.leaves_doubt() => {}
            _ => standing.missed(),
        }
        drop(standing);
        let freed = written?.rows > 0;
        if freed {
            self.site.freed(&party.claim.mutex, version + 1);
        }
        Ok(freed)
    }

    async fn read(&mut self) -> Result<Option<Row>, Fault> {
        let rows = self.link.rows(self.limit(), &self.site.statements.read, vec![self.party.mutex()]).await?;
        Ok(rows.into_iter().next())
    }

    fn limit(&self) -> Duration {
        self.site.limit(&self.party.claim.lease)
    }
}
