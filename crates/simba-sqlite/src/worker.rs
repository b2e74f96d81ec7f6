//! The thread that owns the file: applies all pending changes in one transaction and notifies waiters.

use std::hint;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use simba_core::operate::Finding;
use simba_core::spi::Wakeups;
use simba_core::{Clock, Result};
use tokio::sync::oneshot;

use crate::connection::{Request, Write};
use crate::database::Database;
use crate::probe;
use crate::wakeups::{Notifier, Topic};

/// The most changes in one transaction: other processes use the file, too.
const BATCH: usize = 128;

/// How often a busy worker polls for a request before it sleeps: some 50 microseconds in all.
const SPINS: u32 = 1_000;
/// The worker counts as busy if its last request arrived within this time.
const BUSY_WITHIN: Duration = Duration::from_micros(200);

pub(crate) struct Worker {
    pub(crate) database: Database,
    pub(crate) notifier: Notifier,
    /// Changes without a caller that could not be made yet.
    retries: Vec<Box<dyn Write>>,
    /// Whether the last request arrived within [`BUSY_WITHIN`].
    busy: bool,
    /// Whether the machine has one core: a worker that spins there keeps its caller from running.
    single_core: bool,
}

impl Worker {
    pub(crate) fn open(
        path: &Path,
        clock: Arc<dyn Clock>,
        wakeups: Wakeups<Topic>,
        requests: Sender<Request>,
    ) -> Result<Self> {
        let database = Database::open(path, clock)?;
        let notifier = Notifier::new(&database.path, wakeups, requests);
        let single_core = thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
        Ok(Self { database, notifier, retries: Vec::new(), busy: false, single_core })
    }

    /// Serves requests until one of them is [`Request::Close`], or no sender is left.
    pub(crate) fn run(mut self, requests: &Receiver<Request>) {
        let _closing = self.serve(requests);
        let Self { database, notifier, .. } = self;
        // SQLite removes the journal with the last connection.
        drop(database);
        notifier.close();
    }

    fn serve(&mut self, requests: &Receiver<Request>) -> Option<oneshot::Sender<()>> {
        let mut writes = Vec::new();
        loop {
            let mut next = Some(self.next(requests)?);
            while let Some(request) = next {
                match request {
                    Request::Write(write) => writes.push(write),
                    Request::Run(run) => run(self),
                    Request::Close(closing) => {
                        self.write(&mut writes);
                        return Some(closing);
                    }
                }
                next = if writes.len() < BATCH { requests.try_recv().ok() } else { None };
            }
            self.write(&mut writes);
        }
    }

    /// Waits for a request. While the worker is busy, it spins before it sleeps: to wake a thread takes longer than a
    /// request.
    fn next(&mut self, requests: &Receiver<Request>) -> Option<Request> {
        let poll = || Some(Request::Run(Box::new(Self::poll)));
        // Before anything else, or a busy handle would never check.
        let recheck_at = self.notifier.recheck_at;
        if recheck_at.is_some_and(|at| at <= Instant::now()) {
            return poll();
        }
        if self.busy {
            for _ in 0..SPINS {
                match requests.try_recv() {
                    Ok(request) => return Some(request),
                    Err(_) => hint::spin_loop(),
                }
            }
        }
        let idle = Instant::now();
        let request = match recheck_at {
            None => requests.recv().ok(),
            Some(at) => match requests.recv_timeout(at.saturating_duration_since(idle)) {
                Ok(request) => Some(request),
                Err(RecvTimeoutError::Timeout) => poll(),
                Err(RecvTimeoutError::Disconnected) => None,
            },
        };
        self.busy = !self.single_core && idle.elapsed() < BUSY_WITHIN;
        request
    }

    /// Applies all changes in one transaction. If it fails for another reason than a fault of the store, each change is
    /// repeated in its own transaction, so that a row that cannot be read fails only the calls on its own mutex.
    fn write(&mut self, writes: &mut Vec<Box<dyn Write>>) {
        writes.retain(|write| !write.is_cancelled());
        let ttl = match writes.is_empty() {
            // No caller waits for a retry, so it must not delay the next call.
            true => Some(Duration::ZERO),
            false => writes.iter().filter_map(|write| write.ttl()).min(),
        };
        writes.append(&mut self.retries);
        if writes.is_empty() {
            return;
        }
        let (states, outcome) = match self.database.write(writes, ttl) {
            Ok(states) => (states, Ok(())),
            Err(error) if writes.len() > 1 && !error.is_transient() => {
                writes.drain(..).for_each(|write| self.write(&mut vec![write]));
                return;
            }
            Err(error) => (Vec::new(), Err(error)),
        };
        let others = self.notifier.notify(states);
        for write in writes.drain(..) {
            match &outcome {
                Err(error) if write.is_background() && error.is_transient() => self.retries.push(write),
                outcome => write.reply(outcome.clone()),
            }
        }
        if !self.retries.is_empty() {
            self.notifier.recheck();
        }
        if others {
            // After the replies, which do not depend on it.
            self.notifier.notify_others();
        }
    }

    pub(crate) fn findings(&mut self) -> Result<Vec<Finding>> {
        let watched = self.notifier.watch();
        self.database.read(|_| probe::findings(&self.database, watched))
    }

    /// Notifies the sessions of this handle of changes by other processes.
    pub(crate) fn poll(&mut self) {
        self.notifier.poll(&self.database);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use simba_core::spi::{Answer, Claim, Prior};
    use simba_core::{ContenderId, ErrorKind, Lease, SystemClock};

    use super::*;
    use crate::connection::Change;
    use crate::tables::{SessionId, Tables};

    #[test]
    fn row_that_cannot_be_read_fails_only_its_own_change_of_a_batch() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("simba.db");
        let mut worker =
            Worker::open(&path, Arc::new(SystemClock), Wakeups::local(), mpsc::channel().0).unwrap();
        let acquire = |mutex: &str| {
            let claim = Claim::new(mutex.parse().unwrap(), ContenderId::generate(), Lease::default());
            let (caller, reply) = oneshot::channel();
            let session = SessionId::generate();
            let apply = move |tables: &mut Tables<'_>| tables.contend(session, &claim, Prior::Nothing);
            let change = Change { ttl: None, caller: Some(caller), apply, outcome: None };
            (Box::new(change) as Box<dyn Write>, reply)
        };
        let (first, reply) = acquire("unreadable");
        worker.write(&mut vec![first]);
        reply.blocking_recv().unwrap().unwrap();
        let owner = "UPDATE simba_mutex SET owner = CAST(x'ff' AS TEXT)";
        rusqlite::Connection::open(&path).unwrap().execute_batch(owner).unwrap();
        let [(one, orders), (two, unreadable), (three, bills)] =
            ["orders", "unreadable", "bills"].map(acquire);
        worker.write(&mut vec![one, two, three]);
        let [orders, unreadable, bills] =
            [orders, unreadable, bills].map(|reply| reply.blocking_recv().unwrap());
        assert!(matches!(orders, Ok(Answer::Ours(_))), "{orders:?}");
        assert!(matches!(bills, Ok(Answer::Ours(_))), "{bills:?}");
        assert_eq!(unreadable.unwrap_err().kind(), ErrorKind::Protocol);
    }
}
