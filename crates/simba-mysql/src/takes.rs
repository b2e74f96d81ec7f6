//! First tries and looks that come together share statements: one look for all, one statement that makes the rows
//! that are missing, one that takes what is free, at the versions that the look found.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use mysql_async::Value;
use simba_core::{Answer, MutexName};

use crate::call::Party;
use crate::decide::{Move, decide};
use crate::error::{Fault, NAME};
use crate::link::Written;
use crate::renewals::{filled, late, of_equal_lease};
use crate::row::Row;
use crate::standing::Standing;
use crate::statements::TAKES;
use crate::worker::{Job, Worker};

/// Who takes, and the version at which the mutex was free.
type Taker = (Job, u64);

impl Worker {
    /// Takes what is free of all of them, and says who holds the rest.
    pub(crate) async fn take_all(&mut self, jobs: Vec<Job>) {
        for jobs in of_equal_lease(jobs, TAKES) {
            self.take_together(jobs).await;
        }
    }

    async fn take_together(&mut self, jobs: Vec<Job>) {
        if jobs.len() <= 1 {
            return self.serve_all(jobs).await;
        }
        jobs.iter().for_each(|job| job.party.standing().forget());
        let Ok(rows) = self.read_shared(&jobs).await else { return self.serve_all(jobs).await };
        let mut round = Round::default();
        for job in jobs {
            round.sort(job, &rows);
        }
        let Round { mut takers, missing, mut late, .. } = round;
        takers.extend(self.make_rows(missing, &mut late).await);
        self.take_free(takers).await;
        self.tell_late(late).await;
    }

    /// Tells who came after another of this process, on the same mutex, what became of it.
    async fn tell_late(&mut self, jobs: Vec<Job>) {
        if jobs.len() <= 1 {
            return self.serve_all(jobs).await;
        }
        let Ok(rows) = self.read_shared(&jobs).await else { return self.serve_all(jobs).await };
        let mut rest = Vec::new();
        for job in jobs {
            match rows.get(job.party.claim.mutex.as_str()) {
                Some(row) if wanted(&job, row) == Move::Yield => refuse(job, row),
                _ => rest.push(job),
            }
        }
        self.serve_all(rest).await;
    }

    /// Makes the rows of mutexes that nobody ever used. If another was quicker with one, all look again.
    async fn make_rows(&mut self, jobs: Vec<Job>, late: &mut Vec<Job>) -> Vec<Taker> {
        if jobs.is_empty() {
            return Vec::new();
        }
        let site = Arc::clone(&self.site);
        let (text, size) = site.statements.insert_many(jobs.len());
        let mut names: Vec<_> = filled(&jobs, size).map(|job| job.party.claim.mutex.clone()).collect();
        // Two who make the same rows in different orders would wait for each other.
        names.sort();
        let names = names.iter().map(|name| Value::from(name.as_str())).collect();
        match self.write_shared(&jobs, text, names).await {
            Ok(made) if made.rows == jobs.len() as u64 => jobs.into_iter().map(|job| (job, 0)).collect(),
            _ => {
                late.extend(jobs);
                Vec::new()
            }
        }
    }

    async fn take_free(&mut self, takers: Vec<Taker>) {
        if takers.len() <= 1 {
            let known = takers.into_iter().map(|(job, version)| job.offered(version));
            return self.serve_all(known.collect()).await;
        }
        let (jobs, versions): (Vec<Job>, Vec<u64>) = takers.into_iter().unzip();
        match self.send_takes(&jobs, &versions).await {
            Ok(written) if written.rows == jobs.len() as u64 => {
                jobs.into_iter().zip(versions).for_each(|(job, version)| self.took(job, version));
            }
            Ok(written) => self.sort_out_takes(jobs, versions, &written).await,
            Err(fault) => self.take_one_by_one(jobs, fault).await,
        }
    }

    async fn send_takes(&mut self, jobs: &[Job], versions: &[u64]) -> Result<Written, Fault> {
        let site = Arc::clone(&self.site);
        let (text, size) = site.statements.take_many(jobs.len());
        let Some((last, version)) = jobs.last().zip(versions.last()) else { return Err(Fault::nothing()) };
        self.hold(&last.party.claim.lease);
        let mut values = vec![Value::from(last.party.ttl_ms()), Value::from(last.party.total_ms())];
        values.extend(filled(jobs, size).map(|job| job.party.mutex()));
        values.extend(filled(jobs, size).map(|job| job.party.id()));
        values.extend(filled(jobs, size).map(|job| job.party.mutex()));
        let versions = versions.iter().chain(std::iter::repeat(version));
        for (job, version) in filled(jobs, size).zip(versions) {
            values.extend([job.party.mutex(), Value::from(*version)]);
        }
        let written = self.write_shared(jobs, text, values).await?;
        if let Some(reading) = written.reading() {
            site.server_clock.read(reading);
        }
        Ok(written)
    }

    /// Fewer rows than takers: a look at all of them tells which. What the statement took has our id, the next
    /// version, and the server's time of that statement.
    async fn sort_out_takes(&mut self, jobs: Vec<Job>, versions: Vec<u64>, written: &Written) {
        let rows = match self.read_shared(&jobs).await {
            Ok(rows) => rows,
            Err(fault) => return self.take_one_by_one(jobs, fault).await,
        };
        let mut rest = Vec::new();
        for (job, version) in jobs.into_iter().zip(versions) {
            match rows.get(job.party.claim.mutex.as_str()) {
                Some(row) if is_taken(&job.party, row, version, written.number) => self.took(job, version),
                _ => rest.push(job),
            }
        }
        self.serve_all(rest).await;
    }

    /// The outcome is unknown, so each adopts what it may have won.
    async fn take_one_by_one(&mut self, jobs: Vec<Job>, fault: Fault) {
        match fault {
            Fault::Late(error) => late(jobs, &error),
            Fault::Demoted(error) => jobs.into_iter().for_each(|job| job.fail(error.clone())),
            Fault::Locked(_) => {
                drop(self.mark_locked(&jobs).await);
                self.serve_all(jobs).await;
            }
            fault if fault.leaves_doubt() => {
                self.serve_all(jobs.into_iter().map(Job::in_doubt).collect()).await
            }
            _ => self.serve_all(jobs).await,
        }
    }

    fn took(&self, job: Job, version: u64) {
        let Party { claim, .. } = &*job.party;
        job.party.standing().began(version + 1);
        self.site.note_version(&claim.mutex, version + 1);
        self.site.waiters.took(&claim.mutex, claim.contender.as_str());
        let ours = job.party.ours(job.party.whole_lease()).map_err(Fault::into_error);
        job.answer(ours);
    }
}

/// The jobs of one look, by what it found.
#[derive(Default)]
struct Round {
    takers: Vec<Taker>,
    /// The mutex has no row.
    missing: Vec<Job>,
    /// Another of these jobs is about the same mutex and comes first, or it takes more than a take.
    late: Vec<Job>,
    mutexes: HashSet<MutexName>,
}

impl Round {
    fn sort(&mut self, job: Job, rows: &HashMap<String, Row>) {
        let row = rows.get(job.party.claim.mutex.as_str());
        match row.map(|row| (wanted(&job, row), row)) {
            Some((Move::Yield, row)) => refuse(job, row),
            _ if !self.mutexes.insert(job.party.claim.mutex.clone()) => self.late.push(job),
            Some((Move::Take, row)) => self.takers.push((job, row.version)),
            Some(_) => self.late.push(job),
            None => self.missing.push(job),
        }
    }
}

/// What who remembers nothing does about a row.
fn wanted(job: &Job, row: &Row) -> Move {
    decide(job.prior(), &Standing::default(), &job.party.claim.contender, row)
}

fn is_taken(party: &Party, row: &Row, version: u64, at: Option<u64>) -> bool {
    row.is_held_by(&party.claim.contender) && row.version == version + 1 && Some(row.acquired_at) == at
}

fn refuse(job: Job, row: &Row) {
    let held = row.ownership().map_err(|error| error.with_backend(NAME));
    let answer = held.map(|held| held.map_or(Answer::Vacant, Answer::Held));
    job.answer(answer);
}
