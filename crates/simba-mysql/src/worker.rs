//! One connection's calls, in order: a session's calls all go to the same worker, so a call that was dropped
//! runs to its end there before the next one begins.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use simba_core::{Answer, Error, Holding, Lease, Moment, Ownership, Prior, Result, within};
use tokio::sync::{mpsc, oneshot};

use crate::call::{Call, Party};
use crate::error::{Fault, closed};
use crate::link::{Link, Purpose};
use crate::site::Site;

/// The most calls that are taken up at once; the rest wait for the next turn.
const TURN: usize = 512;
/// A connection that was idle for so long is asked whether it lives.
const IDLE: Duration = Duration::from_secs(15);
/// While something is held it is asked more often, but not more often than this: a connection that broke is made
/// anew before the next renewal needs it. On a slow network a renewal would wait for the answer.
const ALERT: Duration = Duration::from_millis(200);
const PING: Duration = Duration::from_secs(1);
/// How often one call is tried again at once after a lost connection, and after a statement that took the server too
/// long: it may have been busy for a moment.
const LOST_TRIES: u32 = 2;
const OVERDUE_TRIES: u32 = 2;
/// The pauses after which one call tries a locked row again. A peer's transaction takes a few round trips. The calls
/// behind this one wait too. So once a call has paused and given up, no other call of its turn pauses, and no call for
/// the same mutex until its row was found unlocked.
const LOCKED_PAUSES: [Duration; 4] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(20),
    Duration::from_millis(50),
];

/// A call that waits for its turn.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) party: Arc<Party>,
    pub(crate) request: Request,
    _load: Load,
}

/// The way to a worker.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    queue: mpsc::UnboundedSender<Job>,
    load: Arc<AtomicUsize>,
}

/// Counts a call for as long as it waits or is under way.
#[derive(Debug)]
struct Load(Arc<AtomicUsize>);

impl Way {
    /// Queues a call. It is carried out whether or not its reply is waited for.
    ///
    /// # Errors
    ///
    /// The worker is gone.
    pub(crate) fn send(&self, party: Arc<Party>, request: Request) -> Result<()> {
        self.load.fetch_add(1, Ordering::Relaxed);
        let job = Job { party, request, _load: Load(Arc::clone(&self.load)) };
        self.queue.send(job).map_err(|_| closed())
    }

    /// How many sessions have this way, counting each call that waits or is under way once more.
    pub(crate) fn sessions(&self) -> usize {
        Arc::strong_count(&self.load)
    }

    /// How many calls wait or are under way there.
    pub(crate) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a session asks for, and where the reply goes.
#[derive(Debug)]
pub(crate) enum Request {
    Contend { prior: Prior, offer: Option<u64>, reply: oneshot::Sender<Result<Answer>> },
    Inspect { reply: oneshot::Sender<Result<Option<Ownership>>> },
    Release { holding: Holding, reply: oneshot::Sender<Result<()>> },
}

impl Job {
    /// Whether nobody waits for it any more and it need not be done either.
    fn is_moot(&self) -> bool {
        match &self.request {
            Request::Contend { reply, .. } => reply.is_closed(),
            Request::Inspect { reply } => reply.is_closed(),
            // What is to be freed is freed, whoever waits.
            Request::Release { .. } => false,
        }
    }

    pub(crate) fn fail(self, error: Error) {
        match self.request {
            Request::Contend { reply, .. } => drop(reply.send(Err(error))),
            Request::Inspect { reply } => drop(reply.send(Err(error))),
            Request::Release { reply, .. } => drop(reply.send(Err(error))),
        }
    }

    /// With which others it can share statements, if with any.
    fn share(&self) -> Option<Share> {
        let standing = self.party.standing();
        match &self.request {
            // A locked row and a write without an answer are sorted out for all renewals together.
            Request::Contend { prior: Prior::Held | Prior::Unknown, .. } if standing.seen().is_some() => {
                Some(Share::Renewal)
            }
            _ if standing.suspect => None,
            Request::Contend { prior: Prior::Nothing | Prior::Unknown, .. } => Some(Share::Take),
            Request::Release { holding: Holding::Under(token), .. } if standing.token() == Some(*token) => {
                standing.seen_for_sure().map(|_| Share::Release)
            }
            _ => None,
        }
    }

    /// What the contender may have already.
    pub(crate) fn prior(&self) -> Prior {
        match &self.request {
            Request::Contend { prior, .. } => *prior,
            _ => Prior::Nothing,
        }
    }

    /// The same call after one that may have won: our own id in the row is ours.
    pub(crate) fn in_doubt(mut self) -> Self {
        if let Request::Contend { prior, .. } = &mut self.request {
            *prior = Prior::Unknown;
        }
        self
    }

    /// The same call, with the version at which the mutex was just seen free.
    pub(crate) fn offered(mut self, version: u64) -> Self {
        if let Request::Contend { offer, .. } = &mut self.request {
            *offer = Some(version);
        }
        self
    }

    /// The answer to a contender.
    pub(crate) fn answer(self, answer: Result<Answer>) {
        if let Request::Contend { reply, .. } = self.request {
            drop(reply.send(answer));
        }
    }

    /// The answer to who gave something up.
    pub(crate) fn released(self) {
        if let Request::Release { reply, .. } = self.request {
            drop(reply.send(Ok(())));
        }
    }
}

/// What several calls have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Share {
    Renewal,
    Take,
    Release,
}

/// Owns a connection and the queue in front of it.
pub(crate) struct Worker {
    pub(crate) site: Arc<Site>,
    pub(crate) link: Link,
    queue: mpsc::UnboundedReceiver<Job>,
    /// Until when something is held through this connection, for all that it knows.
    held_until: Moment,
    /// A call of this turn paused for a locked row and gave up.
    gave_up: bool,
}

impl Worker {
    /// A worker and the way to it. It connects when it runs.
    pub(crate) fn new(site: Arc<Site>) -> (Self, Way) {
        let (sender, queue) = mpsc::unbounded_channel();
        let link = Link::new(Arc::clone(&site), Purpose::Calls);
        let way = Way { queue: sender, load: Arc::default() };
        (Self { site, link, queue, held_until: Moment::ZERO, gave_up: false }, way)
    }

    /// Connects ahead of the first call.
    ///
    /// # Errors
    ///
    /// There is no connection, and why.
    pub(crate) async fn connect(&mut self) -> Result<()> {
        self.link.ready().await?;
        self.link.warm_up().await;
        Ok(())
    }

    /// Serves calls until every session and the backend are gone.
    pub(crate) async fn run(mut self) {
        while let Some(first) = self.next().await {
            let mut jobs = vec![first];
            let ready = std::iter::from_fn(|| self.queue.try_recv().ok());
            jobs.extend(ready.take(TURN - 1));
            jobs.retain(|job| !job.is_moot());
            self.turn(jobs).await;
            if self.queue.is_empty() {
                self.link.prepare_next().await;
            }
        }
    }

    /// The next call; meanwhile an idle connection is kept alive.
    async fn next(&mut self) -> Option<Job> {
        loop {
            let site = Arc::clone(&self.site);
            let alert = site.clock.now() < self.held_until && !self.link.is_slow();
            let idle = if alert { site.shortest().max(ALERT) } else { IDLE };
            match within(&*site.clock, idle, self.queue.recv()).await {
                Some(job) => return job,
                None => self.link.ping(PING).await,
            }
        }
    }

    /// Something is held by this lease from now on.
    pub(crate) fn hold(&mut self, lease: &Lease) {
        self.held_until = self.held_until.max(self.site.clock.now() + lease.total());
    }

    async fn turn(&mut self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        self.gave_up = false;
        if let Err(error) = self.link.ready().await {
            // Whatever queued up behind the try waited for the same connection.
            jobs.into_iter().for_each(|job| job.fail(error.clone()));
            while let Ok(job) = self.queue.try_recv() {
                job.fail(error.clone());
            }
            return;
        }
        if jobs.len() == 1 {
            // There is nobody to share with.
            return self.serve_all(jobs).await;
        }
        let Turn { renewals, takes, releases, rest } = Turn::of(jobs);
        // What has the least time comes first.
        self.renew_all(renewals).await;
        self.release_all(releases).await;
        self.take_all(takes).await;
        self.serve_all(rest).await;
    }

    /// Carries calls out one by one.
    pub(crate) async fn serve_all(&mut self, jobs: Vec<Job>) {
        for job in jobs {
            match self.link.ready().await {
                Ok(_) => self.serve(job).await,
                Err(error) => job.fail(error),
            }
        }
    }

    /// Carries one call out.
    pub(crate) async fn serve(&mut self, job: Job) {
        if job.is_moot() {
            return;
        }
        let Job { party, request, _load } = job;
        match request {
            Request::Contend { prior, offer, reply } => {
                let answer = self.contend(&party, prior, offer, &reply).await;
                if let Ok(Answer::Ours(_)) = &answer {
                    self.hold(&party.claim.lease);
                    self.site.note_unlocked(&party.claim.mutex);
                }
                drop(reply.send(answer));
            }
            Request::Inspect { reply } => {
                let seen = self.inspect(&party).await;
                drop(reply.send(seen));
            }
            Request::Release { holding, reply } => {
                let released = self.release(&party, holding).await;
                drop(reply.send(released));
            }
        }
    }

    async fn contend(
        &mut self,
        party: &Party,
        prior: Prior,
        offer: Option<u64>,
        reply: &oneshot::Sender<Result<Answer>>,
    ) -> Result<Answer> {
        let (mut tries, mut doubt) = (self.tries(party), false);
        loop {
            let mut call = Call { site: &self.site, link: &mut self.link, party, doubt: &mut doubt };
            let outcome = call.contend(prior, offer).await;
            if let Err(Fault::Locked(_) | Fault::Overdue(_) | Fault::Late(_)) = &outcome {
                party.standing().suspect = true;
            }
            let fault = match outcome {
                Ok(answer) => return Ok(answer),
                // Nobody waits for another try; who asks next may have less time.
                Err(fault) if reply.is_closed() => return Err(fault.into_error()),
                Err(fault) => fault,
            };
            self.recover(party, &mut tries, fault).await?;
        }
    }

    async fn inspect(&mut self, party: &Party) -> Result<Option<Ownership>> {
        let mut tries = self.tries(party);
        loop {
            let mut call = Call { site: &self.site, link: &mut self.link, party, doubt: &mut false };
            let fault = match call.inspect().await {
                Ok(seen) => return Ok(seen),
                Err(fault) => fault,
            };
            self.recover(party, &mut tries, fault).await?;
        }
    }

    async fn release(&mut self, party: &Party, holding: Holding) -> Result<()> {
        let mut tries = self.tries(party);
        loop {
            let mut call = Call { site: &self.site, link: &mut self.link, party, doubt: &mut false };
            let outcome = call.release(holding).await;
            if let Err(Fault::Locked(_) | Fault::Overdue(_) | Fault::Late(_)) = &outcome {
                party.standing().suspect = true;
            }
            let fault = match outcome {
                Ok(()) => return Ok(()),
                Err(fault) => fault,
            };
            self.recover(party, &mut tries, fault).await?;
        }
    }

    /// Makes way for another try at once, or gives the error back.
    async fn recover(&mut self, party: &Party, tries: &mut Tries, fault: Fault) -> Result<()> {
        match fault {
            Fault::Lost(_) if tries.lost < LOST_TRIES => {
                tries.lost += 1;
                self.link.ready().await.map(drop)
            }
            Fault::Locked(error) => {
                let Some((pause, rest)) = tries.pauses.split_first() else {
                    self.gave_up = true;
                    self.site.note_locked(&party.claim.mutex);
                    return Err(error);
                };
                tries.pauses = rest;
                self.site.clock.sleep_until(self.site.clock.now() + *pause).await;
                Ok(())
            }
            Fault::Overdue(_) if tries.overdue < OVERDUE_TRIES => {
                tries.overdue += 1;
                Ok(())
            }
            fault => Err(fault.into_error()),
        }
    }

    /// Returns what a new call may try.
    fn tries(&self, party: &Party) -> Tries {
        let pauses = !self.gave_up && !self.site.stays_locked(&party.claim.mutex);
        Tries { lost: 0, overdue: 0, pauses: if pauses { &LOCKED_PAUSES } else { &[] } }
    }
}

/// What one call has tried so far.
#[derive(Clone, Copy, Debug)]
struct Tries {
    lost: u32,
    overdue: u32,
    /// The pauses that are left for a locked row.
    pauses: &'static [Duration],
}

/// The calls of one turn: those that can share statements, and the rest in order.
#[derive(Default)]
struct Turn {
    renewals: Vec<Job>,
    takes: Vec<Job>,
    releases: Vec<Job>,
    rest: Vec<Job>,
}

impl Turn {
    /// A session's later call never goes before an earlier one, and no write is about a mutex twice.
    fn of(jobs: Vec<Job>) -> Self {
        let (mut turn, mut parties, mut mutexes) = (Self::default(), HashSet::new(), HashSet::new());
        for job in jobs {
            let first = parties.insert(Arc::as_ptr(&job.party) as usize);
            match job.share().filter(|_| first) {
                Some(Share::Take) => turn.takes.push(job),
                Some(share) if mutexes.insert((share, job.party.claim.mutex.clone())) => match share {
                    Share::Renewal => turn.renewals.push(job),
                    _ => turn.releases.push(job),
                },
                _ => turn.rest.push(job),
            }
        }
        turn
    }
}
