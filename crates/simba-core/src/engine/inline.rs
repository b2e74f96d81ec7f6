//! Runs the calls of a short hold in the caller's task instead of a spawned one.
//!
//! An uncontended lock and its release then need no task switch, which often is a switch to another processor as well.
//! Between the two calls the driver is not polled: it holds the mutex and has no call to make. It is spawned when it has
//! to wait, when the caller drops its future or guard, when a shutdown begins, and when it is older than 10 ms. A driver
//! that will probably have to wait, as the last one of its locker had to, has a task from its start.

use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::{Handle, Id};

use super::core::Core;
use super::link::Link;
use crate::clock::Moment;

/// The age at which a driver gets a task: short compared with a lease, long compared with a call.
const MAX_AGE: Duration = Duration::from_millis(10);
/// The minimum time to the first renewal of a driver that runs inline, so that it has a task by then.
pub(super) const MIN_RENEWAL: Duration = Duration::from_millis(60);

/// A driver that runs in the task of its caller. Dropping it spawns the driver.
pub(crate) struct Inline {
    core: Arc<Core>,
    runtime: Id,
    number: u64,
}

impl Inline {
    pub(super) fn start(
        core: &Arc<Core>,
        runtime: Handle,
        link: Link,
        since: Moment,
        driver: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        link.set_inline(true);
        let number = core.inline.next.fetch_add(1, Ordering::Relaxed);
        let inline = Self { core: Arc::clone(core), runtime: runtime.id(), number };
        inline.put(InlineDriver { future: Box::pin(core.track(driver)), link, runtime, since, caller: None });
        inline
    }

    /// Runs the driver in this task until `end` completes, which only the driver can bring about. Does nothing for a
    /// driver that has a task.
    ///
    /// # Cancel safety
    ///
    /// The driver continues with the next call, or in a spawned task.
    pub(crate) async fn until<F: Future>(&self, end: F) -> F::Output {
        let mut end = pin!(end);
        poll_fn(|context| {
            // The driver would wake this task for `end` while this task polls the driver: for nothing, and a task that
            // is woken while it runs is scheduled once more, often on another processor.
            match self.poll(context) {
                true => end.as_mut().poll(&mut Context::from_waker(Waker::noop())),
                false => end.as_mut().poll(context),
            }
        })
        .await
    }

    /// Polls the driver, unless it has a task. Returns whether it still has none.
    fn poll(&self, context: &mut Context<'_>) -> bool {
        let Some(mut driver) = self.take() else { return false };
        let inside = driver.runtime.enter();
        let polled = driver.future.as_mut().poll(context);
        drop(inside);
        match polled {
            Poll::Ready(()) => false,
            Poll::Pending if driver.link.is_inline() => {
                driver.caller = Some(context.waker().clone());
                self.put(driver);
                true
            }
            // It waits for more than a reply, such as a release by another holder.
            Poll::Pending => {
                // The caller runs, and waits on the link after this: to wake it would only schedule it once more.
                driver.caller = None;
                driver.spawn();
                false
            }
        }
    }

    fn take(&self) -> Option<InlineDriver> {
        self.core.inline.runtimes().get_mut(&self.runtime)?.remove(&self.number)
    }

    /// Keeps the driver until it is taken or swept. Spawns it after the start of a shutdown, which spawns all once.
    fn put(&self, driver: InlineDriver) {
        let runtime = driver.runtime.clone();
        let mut runtimes = self.core.inline.runtimes();
        if self.core.closing.has_begun() {
            drop(runtimes);
            return driver.spawn();
        }
        let has_sweeper = runtimes.contains_key(&self.runtime);
        runtimes.entry(self.runtime).or_default().insert(self.number, driver);
        drop(runtimes);
        if !has_sweeper {
            runtime
                .spawn(Sweeper { core: Arc::clone(&self.core), runtime: self.runtime, running: true }.run());
            // tokio keeps the last spawned task for the same worker. If the caller blocked that worker right after its
            // lock, no driver of the runtime would be spawned. After an empty task another worker can take the sweeper.
            runtime.spawn(async {});
        }
    }
}

impl Drop for Inline {
    fn drop(&mut self) {
        if let Some(driver) = self.take() {
            driver.spawn();
        }
    }
}

struct InlineDriver {
    future: Pin<Box<dyn Future<Output = ()> + Send>>,
    link: Link,
    runtime: Handle,
    since: Moment,
    /// The task that polled the driver last. Until the driver is spawned, that task does not wait on the link.
    caller: Option<Waker>,
}

impl InlineDriver {
    /// Continues the driver in a spawned task. Its caller waits on the link.
    fn spawn(self) {
        self.link.set_inline(false);
        self.runtime.spawn(self.future);
        self.caller.into_iter().for_each(Waker::wake);
    }
}

/// All drivers without a task, except those that are being polled.
#[derive(Default)]
pub(super) struct InlineDrivers {
    next: AtomicU64,
    /// Those of each runtime that has a [`Sweeper`], in the order of their start.
    runtimes: Mutex<HashMap<Id, BTreeMap<u64, InlineDriver>>>,
}

impl InlineDrivers {
    /// Spawns all drivers, after the shutdown has begun.
    pub(super) fn spawn_all(&self) {
        let all = std::mem::take(&mut *self.runtimes());
        all.into_values().flat_map(BTreeMap::into_values).for_each(InlineDriver::spawn);
    }

    /// Spawns the drivers of a runtime that started at `then` or before. Returns whether there are others.
    fn spawn_older(&self, runtime: Id, then: Moment) -> bool {
        let mut runtimes = self.runtimes();
        let Some(drivers) = runtimes.get_mut(&runtime) else { return false };
        let mut older = Vec::new();
        while let Some(first) = drivers.first_entry().filter(|first| first.get().since <= then) {
            older.push(first.remove());
        }
        let others = !drivers.is_empty();
        if !others {
            runtimes.remove(&runtime);
        }
        drop(runtimes);
        older.into_iter().for_each(InlineDriver::spawn);
        others
    }

    fn runtimes(&self) -> MutexGuard<'_, HashMap<Id, BTreeMap<u64, InlineDriver>>> {
        self.runtimes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Spawns the drivers of one runtime that are too old. Ends when there is none.
struct Sweeper {
    core: Arc<Core>,
    runtime: Id,
    running: bool,
}

impl Sweeper {
    async fn run(mut self) {
        while self.running {
            let now = self.core.clock.now();
            self.core.clock.sleep_until(now + MAX_AGE).await;
            self.running = self.core.inline.spawn_older(self.runtime, now);
        }
    }
}

/// Spawns every driver of a runtime that ends, so that the runtime drops them.
impl Drop for Sweeper {
    fn drop(&mut self) {
        if self.running {
            self.core.inline.spawn_older(self.runtime, Moment::MAX);
        }
    }
}
