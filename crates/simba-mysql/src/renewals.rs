//! Renewals that fall due together go out as one statement.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use mysql_async::Value;
use simba_core::{Answer, Error};

use crate::call::Party;
use crate::error::{Fault, NAME};
use crate::link::Written;
use crate::row::Row;
use crate::statements::BATCH;
use crate::worker::{Job, Worker};

/// How often a batch goes out before what is left of it is renewed one by one.
const SHARED_TRIES: usize = 3;

impl Worker {
    /// Renews all of them, by as few statements as their leases allow.
    pub(crate) async fn renew_all(&mut self, jobs: Vec<Job>) {
        for jobs in of_equal_lease(jobs, BATCH) {
            self.renew_together(jobs).await;
        }
    }

    /// Renews a batch of equal leases by one statement. If a peer has locked rows of it, or its reply is lost, the
    /// others go out again together. Rows that are locked or not as expected are renewed one by one, last.
    async fn renew_together(&mut self, jobs: Vec<Job>) {
        let (mut jobs, mut apart) = (jobs, Vec::new());
        for _ in 0..SHARED_TRIES {
            if jobs.len() > 1 && self.link.ready().await.is_ok() {
                jobs = self.set_apart(jobs, &mut apart).await;
            }
            if jobs.len() <= 1 {
                break;
            }
            match self.send_renewals(&jobs).await {
                Ok(written) if written.rows == jobs.len() as u64 => jobs.drain(..).for_each(renewed),
                Ok(_) => self.sort_out_renewals(std::mem::take(&mut jobs)).await,
                Err(Fault::Lost(_)) => {}
                Err(Fault::Overdue(_)) => jobs.iter().for_each(suspect),
                Err(Fault::Locked(_)) => {
                    jobs.iter().for_each(undone);
                    jobs.iter().for_each(suspect);
                }
                Err(Fault::Late(error)) => late(std::mem::take(&mut jobs), &error),
                Err(Fault::Demoted(error)) => {
                    jobs.iter().for_each(undone);
                    jobs.drain(..).for_each(|job| job.fail(error.clone()));
                }
                Err(Fault::Refused(_)) => {
                    // One of them may be at fault: its own error is for it alone.
                    jobs.iter().for_each(undone);
                    break;
                }
            }
        }
        self.serve_all(jobs).await;
        self.serve_all(apart).await;
    }

    /// Returns the jobs that can share a statement. Those whose rows a peer has locked, or whose rows our own writes
    /// do not account for, go to `apart`.
    async fn set_apart(&mut self, jobs: Vec<Job>, apart: &mut Vec<Job>) -> Vec<Job> {
        let is_suspect = |job: &Job| job.party.standing().suspect;
        let (suspects, mut ready): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(is_suspect);
        if !suspects.is_empty() {
            match self.mark_locked(&suspects).await {
                // Each of them would wait as long for an answer of its own.
                Err(Fault::Late(error)) => late(suspects, &error),
                Ok(()) | Err(_) => {
                    let (locked, unlocked): (Vec<Job>, Vec<Job>) = suspects.into_iter().partition(is_suspect);
                    tracing::debug!(backend = NAME, locked = locked.len(), "asked for locked rows");
                    apart.extend(locked);
                    ready.extend(unlocked);
                }
            }
        }
        let (unsure, mut ready): (Vec<Job>, Vec<Job>) =
            ready.into_iter().partition(|job| job.party.standing().doubtful().is_some());
        if unsure.is_empty() {
            return ready;
        }
        match self.read_shared(&unsure).await {
            Ok(rows) => {
                let (found, changed): (Vec<Job>, Vec<Job>) = unsure.into_iter().partition(|job| {
                    let row = rows.get(job.party.claim.mutex.as_str());
                    let held = row.filter(|row| row.is_held_by(&job.party.claim.contender));
                    held.is_some_and(|row| job.party.standing().found(row.version))
                });
                ready.extend(found);
                apart.extend(changed);
            }
            Err(Fault::Late(error)) => late(unsure, &error),
            Err(_) => apart.extend(unsure),
        }
        ready
    }

    /// Marks the jobs whose rows a peer has locked, so that their next try does not wait for them.
    ///
    /// # Errors
    ///
    /// The server did not answer, or does not know the statement. All jobs are marked then.
    pub(crate) async fn mark_locked(&mut self, jobs: &[Job]) -> Result<(), Fault> {
        let site = Arc::clone(&self.site);
        let (text, size) = site.statements.unlocked_many(jobs.len());
        let limit = jobs.iter().map(|job| site.limit(&job.party.claim.lease)).min();
        let names = filled(jobs, size).map(|job| job.party.mutex()).collect();
        jobs.iter().for_each(suspect);
        let unlocked: Vec<(String, u64)> = self.link.query(limit.unwrap_or_default(), text, names).await?;
        let unlocked: HashSet<String> = unlocked.into_iter().map(|(name, _)| name).collect();
        for job in jobs.iter().filter(|job| unlocked.contains(job.party.claim.mutex.as_str())) {
            job.party.standing().unlocked();
            site.note_unlocked(&job.party.claim.mutex);
        }
        Ok(())
    }

    async fn send_renewals(&mut self, jobs: &[Job]) -> Result<Written, Fault> {
        let site = Arc::clone(&self.site);
        let (text, size) = site.statements.renew_many(jobs.len());
        let Some(last) = jobs.last() else { return Err(Fault::nothing()) };
        self.hold(&last.party.claim.lease);
        let mut values = vec![Value::from(last.party.ttl_ms()), Value::from(last.party.total_ms())];
        values.extend(holds(jobs, size));
        jobs.iter().for_each(|job| job.party.standing().sent());
        let written = self.write_shared(jobs, text, values).await?;
        if let Some(reading) = written.reading() {
            site.server_clock.read(reading);
        }
        Ok(written)
    }

    /// Fewer rows than renewals: a look at all of them tells which. The rest are for calls of their own.
    async fn sort_out_renewals(&mut self, jobs: Vec<Job>) {
        let Ok(rows) = self.read_shared(&jobs).await else { return self.serve_all(jobs).await };
        let mut rest = Vec::new();
        for job in jobs {
            match rows.get(job.party.claim.mutex.as_str()) {
                Some(row) if is_renewed(&job.party, row) => {
                    job.party.standing().renewed(row.version);
                    let left = row.remaining().min(job.party.whole_lease());
                    let ours = job.party.ours(left).map_err(Fault::into_error);
                    job.answer(ours);
                }
                _ => {
                    undone(&job);
                    rest.push(job);
                }
            }
        }
        self.serve_all(rest).await;
    }

    /// A write for all of them, with the patience of the least patient.
    pub(crate) async fn write_shared(
        &mut self,
        jobs: &[Job],
        text: &str,
        values: Vec<Value>,
    ) -> Result<Written, Fault> {
        self.link.prepare(text).await;
        let limit = jobs.iter().map(|job| self.site.limit(&job.party.claim.lease)).min();
        self.link.write(limit.unwrap_or_default(), text, values).await
    }

    /// The rows of all of them, by name.
    pub(crate) async fn read_shared(&mut self, jobs: &[Job]) -> Result<HashMap<String, Row>, Fault> {
        let site = Arc::clone(&self.site);
        let (text, size) = site.statements.read_many(jobs.len());
        self.link.prepare(text).await;
        let limit = jobs.iter().map(|job| site.limit(&job.party.claim.lease)).min();
        let names = filled(jobs, size).map(|job| job.party.mutex()).collect();
        let rows = self.link.rows(limit.unwrap_or_default(), text, names).await?;
        Ok(rows.into_iter().map(|row| (row.mutex.clone(), row)).collect())
    }
}

/// Groups of equal leases, none larger than `most`.
pub(crate) fn of_equal_lease(jobs: Vec<Job>, most: usize) -> Vec<Vec<Job>> {
    let mut leases: HashMap<(u64, u64), Vec<Job>> = HashMap::new();
    for job in jobs {
        leases.entry((job.party.ttl_ms(), job.party.total_ms())).or_default().push(job);
    }
    let mut groups = Vec::new();
    for mut jobs in leases.into_values() {
        while jobs.len() > most {
            let rest = jobs.split_off(most);
            groups.push(std::mem::replace(&mut jobs, rest));
        }
        groups.push(jobs);
    }
    groups
}

/// The jobs, filled up with the last one: a statement that names a row twice does the same.
pub(crate) fn filled(jobs: &[Job], size: usize) -> impl Iterator<Item = &Job> {
    jobs.iter().chain(jobs.last().into_iter().cycle()).take(size)
}

/// The mutexes, then (mutex, id, version) of each remembered hold.
pub(crate) fn holds(jobs: &[Job], size: usize) -> Vec<Value> {
    let mut values: Vec<Value> = filled(jobs, size).map(|job| job.party.mutex()).collect();
    for job in filled(jobs, size) {
        let seen = job.party.standing().seen().unwrap_or_default();
        values.extend([job.party.mutex(), job.party.id(), seen.into()]);
    }
    values
}

/// Whether the row is in the state in which the shared statement left it.
fn is_renewed(party: &Party, row: &Row) -> bool {
    let seen = party.standing().seen();
    row.is_held_by(&party.claim.contender) && seen.is_some_and(|seen| row.version == seen + 1)
}

fn renewed(job: Job) {
    let mut standing = job.party.standing();
    let version = standing.seen().unwrap_or_default() + 1;
    standing.renewed(version);
    drop(standing);
    let ours: Result<Answer, Fault> = job.party.ours(job.party.whole_lease());
    job.answer(ours.map_err(Fault::into_error));
}

/// The shared statement surely did nothing for this one.
pub(crate) fn undone(job: &Job) {
    job.party.standing().missed();
}

/// A peer may have locked the row of this one.
fn suspect(job: &Job) {
    job.party.standing().suspect = true;
}

/// Nobody answered a statement of all of them. A peer may have locked one row, so each asks for that first the next
/// time.
pub(crate) fn late(jobs: Vec<Job>, error: &Error) {
    for job in jobs {
        suspect(&job);
        job.fail(error.clone());
    }
}
