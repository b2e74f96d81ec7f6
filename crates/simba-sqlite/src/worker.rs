//! The one thread that owns the connection: carries out what is asked, all that waits in one transaction, and
//! rings whom it concerns.

use std::collections::HashMap;
use std::hint;
use std::iter;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use simba_core::{Clock, Error, Hub, MutexName, Result};

use crate::bell::Bell;
use crate::error::explain;
use crate::file::{self, OpenFile};
use crate::findings;
use crate::job::{Job, Outcome, Read, Reply, Settle, Write};
use crate::machine::{BootClock, WaiterThread};
use crate::patience;
use crate::statements as sql;
use crate::table::{Fault, News, Next, SessionId, Standing, Tables};

/// The most changes in one transaction: others want the file, too.
const BATCH: usize = 128;

/// How often a busy worker looks for a job before it sleeps, for some 50 microseconds in all, and how soon the last
/// job must have come for it to count as busy, in microseconds.
const GLANCES: u32 = 1_000;
const SOON: i64 = 200;

/// How soon the worker checks again whether a waiter that was woken in another process still runs, tries again to
/// delete the entries of dropped sessions, and polls for sessions that cannot be woken by the bell, in microseconds.
const CHECK_AGAIN: i64 = 250_000;

/// Whom a hint is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    /// The one waiter whose turn it may be.
    Turn(SessionId),
    /// Everyone who watches the mutex.
    Owner(MutexName),
}

pub(crate) struct Worker {
    file: OpenFile,
    boot: BootClock,
    /// This thread, as other processes know it.
    thread: Option<WaiterThread>,
    clock: Arc<dyn Clock>,
    hub: Hub<Topic>,
    bell: Bell,
    /// For the bell's thread, to ask for a look.
    jobs: Sender<Job>,
    /// Mutexes that sessions of this handle wait for hints about.
    listened: HashMap<MutexName, Listened>,
    /// Sessions that were dropped and whose entries could not be deleted yet.
    leaving: Vec<(SessionId, MutexName)>,
    /// When to check again, see [`CHECK_AGAIN`].
    check_at: Option<i64>,
    /// What others left in the queue was looked through once.
    tidied: bool,
    /// The bell cannot be watched, and that was said.
    deaf: bool,
    /// The last job came soon after the one before.
    busy: bool,
    /// On a machine with one core, whoever looks keeps the caller from asking.
    alone: bool,
}

struct Listened {
    sessions: usize,
    /// As it was last told.
    standing: Standing,
}

impl Worker {
    pub(crate) fn open(
        path: &Path,
        clock: Arc<dyn Clock>,
        hub: Hub<Topic>,
        jobs: Sender<Job>,
    ) -> Result<Self> {
        let boot = BootClock::read()?;
        let file = file::open(path)?;
        let bell = Bell::beside(&file.path);
        let alone = thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
        Ok(Self {
            file,
            boot,
            thread: WaiterThread::current(),
            clock,
            hub,
            bell,
            jobs,
            listened: HashMap::new(),
            leaving: Vec::new(),
            check_at: None,
            tidied: false,
            deaf: false,
            busy: false,
            alone,
        })
    }

    /// Works until told to end, or until nobody can ask any more.
    pub(crate) fn run(mut self, jobs: &Receiver<Job>) {
        let end = self.work(jobs);
        let Self { file, hub, bell, .. } = self;
        drop(bell);
        // The last one to close the file tidies up after all.
        drop(file);
        // Whoever waits for a hint finds out that there are none any more.
        hub.ring_all();
        if let Some(reply) = end {
            reply.send(Ok(()));
        }
    }

    fn work(&mut self, jobs: &Receiver<Job>) -> Option<Reply<()>> {
        let (mut writes, mut reads) = (Vec::new(), Vec::new());
        loop {
            let mut next = Some(self.next(jobs)?);
            while let Some(job) = next {
                match job {
                    Job::Write(write) => writes.push(write),
                    Job::Read(read) => reads.push(read),
                    Job::Listen(mutex, reply) => self.listen(mutex, reply),
                    Job::Unlisten(mutex) => self.unlisten(&mutex),
                    Job::Look => self.look(),
                    Job::End(reply) => {
                        self.write(&mut writes);
                        self.read(&mut reads);
                        return reply;
                    }
                }
                next = if writes.len() < BATCH { jobs.try_recv().ok() } else { None };
            }
            self.write(&mut writes);
            self.read(&mut reads);
        }
    }

    /// Waits for something to do. While jobs come fast, it looks for the next one before it sleeps: to be woken
    /// takes longer than the job.
    fn next(&mut self, jobs: &Receiver<Job>) -> Option<Job> {
        // Before anything else, or a busy handle would never check.
        if self.check_at.is_some_and(|at| at <= self.boot.now()) {
            return Some(Job::Look);
        }
        if self.busy {
            for _ in 0..GLANCES {
                match jobs.try_recv() {
                    Ok(job) => return Some(job),
                    Err(_) => hint::spin_loop(),
                }
            }
        }
        let idle = self.boot.now();
        let job = match self.check_at {
            None => jobs.recv().ok(),
            Some(at) => {
                let pause = Duration::from_micros(u64::try_from(at - idle).unwrap_or_default());
                match jobs.recv_timeout(pause) {
                    Ok(job) => Some(job),
                    Err(RecvTimeoutError::Timeout) => Some(Job::Look),
                    Err(RecvTimeoutError::Disconnected) => None,
                }
            }
        };
        self.busy = !self.alone && self.boot.now() - idle < SOON;
        job
    }

    // ===== changing =====

    /// Makes all changes in one transaction; if that fails, each of them has failed.
    fn write(&mut self, writes: &mut Vec<Write>) {
        writes.retain(|write| !write.is_moot());
        // Nobody waits for another try to leave, so the next call must not have to wait behind it.
        let only_leaving = writes.is_empty().then_some(Duration::ZERO);
        writes.extend(self.leaving.drain(..).map(|(session, mutex)| Write::Leave { session, mutex }));
        if writes.is_empty() {
            return;
        }
        let leaving: Vec<_> = writes.iter().filter_map(Write::leaving).collect();
        patience::limit(writes.iter().filter_map(Write::ttl).chain(only_leaving));
        let begun = self.begin();
        if only_leaving.is_some() {
            patience::limit(iter::empty());
        }
        if let Err(error) = begun {
            self.leave_later(leaving, &error);
            return writes.drain(..).for_each(|write| write.fail(error.clone()));
        }
        let (mut made, mut news) = (Vec::with_capacity(writes.len()), Vec::new());
        let committed = self.make(writes, &mut made, &mut news).and_then(|()| self.commit());
        if let Err(error) = &committed {
            self.roll_back();
            self.leave_later(leaving, error);
            writes.drain(..).for_each(|write| write.fail(error.clone()));
        }
        let others = committed.is_ok() && self.announce(news);
        made.into_iter().for_each(|settle| settle(committed.clone()));
        if others {
            // Last, since nobody here waits for it.
            self.bell.ring();
            if !self.listened.is_empty() {
                // It may be another one than before.
                self.hear();
            }
        }
    }

    /// Keeps sessions that want to leave for the next try, unless another try cannot help.
    fn leave_later(&mut self, leaving: Vec<(SessionId, MutexName)>, error: &Error) {
        if error.is_transient() && !leaving.is_empty() {
            self.leaving = leaving;
            self.check_again();
        }
    }

    fn check_again(&mut self) {
        self.check_at.get_or_insert(self.boot.now() + CHECK_AGAIN);
    }

    fn make(&self, writes: &mut Vec<Write>, made: &mut Vec<Settle>, news: &mut Vec<News>) -> Result<()> {
        let tables = self.tables();
        if !self.tidied {
            tables.bury_all().map_err(|fault| self.blame(fault))?;
        }
        for write in writes.drain(..) {
            match write.make(&tables, news) {
                Outcome::Made(settle) => made.push(settle),
                Outcome::Broken(settle, error) => {
                    made.push(settle);
                    return Err(explain(&self.file.path, error));
                }
            }
        }
        Ok(())
    }

    fn begin(&self) -> Result<()> {
        self.file.check_parts()?;
        self.execute(sql::BEGIN)
    }

    fn commit(&mut self) -> Result<()> {
        self.execute(sql::COMMIT)?;
        self.tidied = true;
        Ok(())
    }

    fn roll_back(&self) {
        // A failure may have rolled it back already.
        if !self.file.connection.is_autocommit()
            && let Err(error) = self.execute(sql::ROLLBACK)
        {
            tracing::warn!(%error, "a failed transaction cannot be rolled back");
        }
    }

    fn execute(&self, statement: &str) -> Result<()> {
        let executed = self.file.connection.prepare_cached(statement).and_then(|mut ready| ready.execute([]));
        executed.map(drop).map_err(|error| explain(&self.file.path, error))
    }

    // ===== reading =====

    fn read(&mut self, reads: &mut Vec<Read>) {
        for read in reads.drain(..) {
            match read {
                Read::Inspect(mutex, reply) => self.answer(reply, || self.tables().inspect(&mutex)),
                Read::Record(mutex, reply) => self.answer(reply, || self.tables().read(&mutex)),
                Read::List(reply) => self.answer(reply, || self.tables().list()),
                Read::Findings(reply) => {
                    let heard = self.hear();
                    self.answer(reply, || findings::of(&self.file, heard));
                }
            }
        }
    }

    fn answer<T>(&self, reply: Reply<T>, read: impl FnOnce() -> Result<T, Fault>) {
        if !reply.is_moot() {
            let found = self.file.check_parts().and_then(|()| read().map_err(|fault| self.blame(fault)));
            reply.send(found);
        }
    }

    fn tables(&self) -> Tables<'_> {
        tables(&self.file, &self.boot, self.thread.as_ref(), &*self.clock)
    }

    fn blame(&self, fault: Fault) -> Error {
        match fault {
            Fault::Sqlite(error) => explain(&self.file.path, error),
            Fault::Row(error) => error,
        }
    }

    // ===== waking =====

    /// Wakes whom it concerns in this process; whether there may be others.
    fn announce(&mut self, news: Vec<News>) -> bool {
        let mut others = false;
        for News { mutex, changed, standing, next } in news {
            let elsewhere = matches!(next, Next::Wake(next) if self.hub.ring(&Topic::Turn(next)) == 0);
            others |= changed || elsewhere;
            if (elsewhere || next == Next::Woken) && self.listened.contains_key(&mutex) {
                self.check_again();
            }
            if changed {
                if let Some(listened) = self.listened.get_mut(&mutex) {
                    listened.standing = standing;
                }
                self.hub.ring(&Topic::Owner(mutex));
            }
        }
        others
    }

    /// Wakes exactly those sessions of this handle whose turn it is, after a ring or at the time of a check.
    fn look(&mut self) {
        self.bell.answer();
        self.check_at = None;
        if self.listened.is_empty() {
            return;
        }
        let began = self.boot.now();
        if let Err(fault) = self.look_through() {
            let error = self.blame(fault);
            tracing::debug!(%error, "nobody can be woken for now: waiters poll");
        }
        // The bell may have been removed, and a new one put up.
        self.hear();
        let took = u64::try_from(self.boot.now() - began).unwrap_or_default();
        self.bell.answered(Duration::from_micros(took));
    }

    fn look_through(&mut self) -> Result<(), Fault> {
        let tables = tables(&self.file, &self.boot, self.thread.as_ref(), &*self.clock);
        let mut elsewhere = false;
        for (mutex, listened) in &mut self.listened {
            let news = tables.news_of(mutex)?;
            if let Next::Wake(next) = news.next {
                elsewhere |= self.hub.ring(&Topic::Turn(next)) == 0;
            }
            if std::mem::replace(&mut listened.standing, news.standing) != news.standing {
                self.hub.ring(&Topic::Owner(mutex.clone()));
            }
        }
        if elsewhere {
            self.check_again();
        }
        Ok(())
    }

    fn listen(&mut self, mutex: MutexName, reply: Reply<()>) {
        self.hear();
        // The call that follows a subscription finds what is missed here.
        let news = self.tables().news_of(&mutex).ok();
        if news.as_ref().is_some_and(|news| news.next != Next::Nobody) {
            self.check_again();
        }
        let standing = news.map(|news| news.standing).unwrap_or_default();
        self.listened.entry(mutex).or_insert(Listened { sessions: 0, standing }).sessions += 1;
        reply.send(Ok(()));
    }

    fn unlisten(&mut self, mutex: &MutexName) {
        if let Some(listened) = self.listened.get_mut(mutex) {
            listened.sessions -= 1;
            if listened.sessions == 0 {
                self.listened.remove(mutex);
            }
        }
    }

    /// Listens to the bell, if that can be had; warns once if not.
    fn hear(&mut self) -> bool {
        let heard = self.bell.listen(&self.jobs);
        if let (Err(error), false) = (&heard, self.deaf) {
            let file = self.file.path.display();
            tracing::warn!(%file, %error, "the file cannot be watched, so waiters poll: {}", findings::WATCH_CURE);
        }
        self.deaf = heard.is_err();
        match heard {
            Ok(false) => {}
            // Find what was missed between the old bell and this one.
            Ok(true) => self.check_at = Some(self.boot.now()),
            // The bell may be removed just before it is watched, and watches may be free again later.
            Err(_) => self.check_again(),
        }
        !self.deaf
    }
}

/// The tables at this moment.
fn tables<'a>(
    file: &'a OpenFile,
    boot: &'a BootClock,
    thread: Option<&'a WaiterThread>,
    clock: &dyn Clock,
) -> Tables<'a> {
    Tables { connection: &file.connection, boot, thread, now: boot.now(), wall: clock.wall() }
}
