//! Releases that come together go out as one statement.

use std::sync::Arc;

use crate::error::Fault;
use crate::renewals::{holds, late, undone};
use crate::statements::BATCH;
use crate::worker::{Job, Worker};

impl Worker {
    /// Frees all of them, by as few statements as there can be.
    pub(crate) async fn release_all(&mut self, mut jobs: Vec<Job>) {
        while !jobs.is_empty() {
            let rest = jobs.split_off(jobs.len().min(BATCH));
            self.release_together(jobs).await;
            jobs = rest;
        }
    }

    async fn release_together(&mut self, jobs: Vec<Job>) {
        if jobs.len() <= 1 {
            return self.serve_all(jobs).await;
        }
        let site = Arc::clone(&self.site);
        let (text, size) = site.statements.release_many(jobs.len());
        let values = holds(&jobs, size);
        jobs.iter().for_each(|job| job.party.standing().sent());
        match self.write_shared(&jobs, text, values).await {
            Ok(written) if written.rows == jobs.len() as u64 => {
                jobs.into_iter().for_each(|job| self.freed(job))
            }
            // A call of its own finds out what became of each: it frees what is still ours, once.
            Ok(_) | Err(Fault::Lost(_) | Fault::Overdue(_)) => self.serve_all(jobs).await,
            Err(Fault::Late(error)) => late(jobs, &error),
            Err(Fault::Demoted(error)) => {
                jobs.iter().for_each(undone);
                jobs.into_iter().for_each(|job| job.fail(error.clone()));
            }
            Err(fault @ (Fault::Locked(_) | Fault::Refused(_))) => {
                jobs.iter().for_each(undone);
                if let Fault::Locked(_) = fault {
                    drop(self.mark_locked(&jobs).await);
                }
                self.serve_all(jobs).await;
            }
        }
    }

    fn freed(&self, job: Job) {
        let mut standing = job.party.standing();
        let version = standing.seen().unwrap_or_default() + 1;
        standing.forget();
        drop(standing);
        self.site.freed(&job.party.claim.mutex, version);
        job.released();
    }
}
