//! Renewals that fall due together go out as one statement.

use std::collections::HashMap;

use mysql_async::Value;
use simba_core::Answer;

use crate::call::Party;
use crate::error::Fault;
use crate::link::Written;
use crate::row::Row;
use crate::statements::BATCH;
use crate::worker::{Job, Request, Worker};

impl Worker {
    /// Renews all of them, by as few statements as their leases allow.
    pub(crate) async fn renew_all(&mut self, jobs: Vec<Job>) {
        let mut leases: HashMap<(u64, u64), Vec<Job>> = HashMap::new();
        for job in jobs {
            leases.entry((job.party.ttl_ms(), job.party.total_ms())).or_default().push(job);
        }
        for mut jobs in leases.into_values() {
            while !jobs.is_empty() {
                let rest = jobs.split_off(jobs.len().min(BATCH));
                self.renew_together(jobs).await;
                jobs = rest;
            }
        }
    }

    /// Renews a batch of equal leases; halves it for as long as a locked row is in it.
    async fn renew_together(&mut self, jobs: Vec<Job>) {
        let mut batches = vec![jobs];
        while let Some(mut jobs) = batches.pop() {
            if jobs.len() <= 1 {
                for job in jobs {
                    self.serve(job).await;
                }
                continue;
            }
            match self.send(&jobs).await {
                Ok(written) if written.rows == jobs.len() as u64 => jobs.into_iter().for_each(renewed),
                Ok(_) => self.sort_out(jobs).await,
                Err(Fault::Locked(_)) => {
                    jobs.iter().for_each(not_renewed);
                    if jobs.len() == 2 {
                        jobs.iter().for_each(|job| job.party.standing().suspect = true);
                    }
                    batches.push(jobs.split_off(jobs.len() / 2));
                    batches.push(jobs);
                }
                Err(Fault::Lost(_) | Fault::Overdue(_)) => self.one_by_one(jobs).await,
                Err(Fault::Late(error)) => jobs.into_iter().for_each(|job| job.fail(error.clone())),
                Err(Fault::Refused(_) | Fault::Demoted(_)) => {
                    // One of them may be at fault: its own error is for it alone.
                    jobs.iter().for_each(not_renewed);
                    self.one_by_one(jobs).await;
                }
            }
        }
    }

    async fn send(&mut self, jobs: &[Job]) -> Result<Written, Fault> {
        let site = std::sync::Arc::clone(&self.site);
        let (text, size) = site.statements.renew_many(jobs.len());
        let limit = jobs.iter().map(|job| site.limit(&job.party.claim.lease)).min().unwrap_or_default();
        jobs.iter().take(1).for_each(|job| self.hold(&job.party.claim.lease));
        self.link.prepare(text).await;
        let written = self.link.write(limit, text, values(jobs, size)).await?;
        if let Some(reading) = written.reading() {
            site.server_clock.read(reading);
        }
        Ok(written)
    }

    /// Fewer rows than renewals: a look at all of them tells which. The rest are for calls of their own.
    async fn sort_out(&mut self, jobs: Vec<Job>) {
        let site = std::sync::Arc::clone(&self.site);
        let (text, size) = site.statements.read_many(jobs.len());
        let names = jobs.iter().map(|job| job.party.mutex());
        let last = jobs.last().map(|job| job.party.mutex());
        let names = names.chain(last.into_iter().cycle()).take(size).collect();
        let limit = jobs.iter().map(|job| site.limit(&job.party.claim.lease)).min().unwrap_or_default();
        let Ok(rows) = self.link.rows(limit, text, names).await else { return self.one_by_one(jobs).await };
        let rows: HashMap<&str, &Row> = rows.iter().map(|row| (row.mutex.as_str(), row)).collect();
        for job in jobs {
            match rows.get(job.party.claim.mutex.as_str()) {
                Some(row) if is_renewed(&job.party, row) => {
                    let left = row.remaining();
                    answer(job, |party| {
                        party.standing().renewed(row.version);
                        party.ours(left.min(party.whole_lease()))
                    });
                }
                _ => {
                    not_renewed(&job);
                    self.serve(job).await;
                }
            }
        }
    }

    /// Each by a call of its own, which finds out what became of the shared one.
    async fn one_by_one(&mut self, jobs: Vec<Job>) {
        for job in jobs {
            match self.link.ready().await {
                Ok(_) => self.serve(job).await,
                Err(error) => job.fail(error),
            }
        }
    }
}

/// The values of a batch, filled up with its last row. Counts a write for each hold.
fn values(jobs: &[Job], size: usize) -> Vec<Value> {
    let mut values = Vec::with_capacity(2 + 4 * size);
    let Some(last) = jobs.last() else { return values };
    values.extend([Value::from(last.party.ttl_ms()), Value::from(last.party.total_ms())]);
    let filled = || jobs.iter().chain(std::iter::repeat(last)).take(size);
    values.extend(filled().map(|job| job.party.mutex()));
    for job in filled() {
        let seen = job.party.standing().seen().unwrap_or_default();
        values.extend([job.party.mutex(), job.party.id(), seen.into()]);
    }
    jobs.iter().for_each(|job| job.party.standing().sent());
    values
}

/// Whether the row is in the state in which the shared statement left it.
fn is_renewed(party: &Party, row: &Row) -> bool {
    let seen = party.standing().seen();
    row.is_held_by(&party.claim.contender) && seen.is_some_and(|seen| row.version == seen + 1)
}

fn renewed(job: Job) {
    answer(job, |party| {
        let mut standing = party.standing();
        let version = standing.seen().unwrap_or_default() + 1;
        standing.renewed(version);
        drop(standing);
        party.ours(party.whole_lease())
    });
}

fn not_renewed(job: &Job) {
    job.party.standing().missed();
}

fn answer(job: Job, ours: impl FnOnce(&Party) -> Result<Answer, Fault>) {
    let answer = ours(&job.party).map_err(Fault::into_error);
    if let Request::Contend { reply, .. } = job.request {
        drop(reply.send(answer));
    }
}
