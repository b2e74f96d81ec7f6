//! Renewals that fall due together go out as one statement.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use mysql_async::Value;
use simba_core::{Answer, Error};

use crate::call::Party;
use crate::error::Fault;
use crate::link::Written;
use crate::row::Row;
use crate::statements::BATCH;
use crate::worker::{Job, Worker};

impl Worker {
    /// Renews all of them, by as few statements as their leases allow.
    pub(crate) async fn renew_all(&mut self, jobs: Vec<Job>) {
        for jobs in of_equal_lease(jobs, BATCH) {
            self.renew_together(jobs).await;
        }
    }

    /// Renews a batch of equal leases. If a peer has locked rows of it, the others go out again without them, and
    /// those rows are renewed one by one, last.
    async fn renew_together(&mut self, jobs: Vec<Job>) {
        let (mut jobs, mut apart) = (jobs, Vec::new());
        if jobs.len() > 1 {
            match self.send_renewals(&jobs).await {
                Err(Fault::Locked(_)) => {
                    jobs.iter().for_each(undone);
                    self.mark_locked(&jobs).await;
                    (apart, jobs) = jobs.into_iter().partition(|job| job.party.standing().suspect);
                }
                sent => return self.settle_renewals(jobs, sent).await,
            }
        }
        if jobs.len() > 1 {
            let sent = self.send_renewals(&jobs).await;
            self.settle_renewals(jobs, sent).await;
        } else {
            self.serve_all(jobs).await;
        }
        self.serve_all(apart).await;
    }

    /// Answers renewals that went out together.
    async fn settle_renewals(&mut self, jobs: Vec<Job>, sent: Result<Written, Fault>) {
        match sent {
            Ok(written) if written.rows == jobs.len() as u64 => jobs.into_iter().for_each(renewed),
            Ok(_) => self.sort_out_renewals(jobs).await,
            Err(Fault::Lost(_) | Fault::Overdue(_)) => self.serve_all(jobs).await,
            Err(Fault::Late(error)) => late(jobs, &error),
            Err(Fault::Demoted(error)) => {
                jobs.iter().for_each(undone);
                jobs.into_iter().for_each(|job| job.fail(error.clone()));
            }
            Err(Fault::Locked(_) | Fault::Refused(_)) => {
                // One of them may be at fault: its own error is for it alone.
                jobs.iter().for_each(undone);
                self.serve_all(jobs).await;
            }
        }
    }

    /// Marks the jobs whose rows a peer has locked, so that their next try does not wait for them.
    pub(crate) async fn mark_locked(&mut self, jobs: &[Job]) {
        let site = Arc::clone(&self.site);
        let (text, size) = site.statements.unlocked_many(jobs.len());
        let limit = jobs.iter().map(|job| site.limit(&job.party.claim.lease)).min();
        let names = filled(jobs, size).map(|job| job.party.mutex()).collect();
        // A server that does not know the statement leaves all of them marked.
        let unlocked: Vec<(String,)> =
            self.link.query(limit.unwrap_or_default(), text, names).await.unwrap_or_default();
        let unlocked: HashSet<String> = unlocked.into_iter().map(|(name,)| name).collect();
        for job in jobs {
            job.party.standing().suspect = !unlocked.contains(job.party.claim.mutex.as_str());
        }
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

/// Nobody answered a statement of all of them. A peer may have locked one row, so each asks for that first the next
/// time.
pub(crate) fn late(jobs: Vec<Job>, error: &Error) {
    for job in jobs {
        job.party.standing().suspect = true;
        job.fail(error.clone());
    }
}
