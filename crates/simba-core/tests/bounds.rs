//! Auto traits: those of every public type, and of the future of every public async
//! method. All are checked at compile time. A change of any of them is a breaking change and fails here.

use std::future::{Future, Ready};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use simba_core::operate::{EvictIf, Eviction, Finding, MutexRecord, Probe};
use simba_core::spi::{
    Answer, Backend, Claim, ConnectUrl, Demand, Holding, Host, Intent, Operate, Ownership, Prior, Session,
    Subscription, Wakeups,
};
use simba_core::{
    Clock, ContenderId, Contention, Error, ErrorKind, FencingToken, Guard, Job, Lease, Locker, Loss,
    MemoryBackend, Moment, MutexName, MutexOwner, MutexState, Observer, Progress, Schedule, Scheduler, Simba,
    SimbaBuilder, Status, SystemClock, Tenure, TokioClock, View, blocking, clock,
};

/// Returns any value of a type.
fn value<T>() -> T {
    unreachable!("never called")
}

/// Fails to compile if the type has the trait: then both implementations apply and `item` is ambiguous.
macro_rules! assert_not {
    ($value:expr, $($trait:tt)+) => {{
        trait Ambiguous<A> {
            fn item(&self) {}
        }
        struct Twice;
        impl<T: ?Sized> Ambiguous<()> for T {}
        impl<T: ?Sized + $($trait)+> Ambiguous<Twice> for T {}
        Ambiguous::item(&$value);
    }};
}

fn full<T: Send + Sync + Unpin + 'static>() {}
fn send<T: Send + Unpin + 'static>() {}
fn sent<F: Future + Send>(_: &F) {}
fn shared<F: Future + Send + Sync>(_: &F) {}

macro_rules! types {
    ($($kind:ident: $($type:ty),+;)+) => {
        const _: fn() = || { $($($kind::<$type>();)+)+ };
    };
}

types! {
    // Handles.
    full: Simba, SimbaBuilder, Locker, Guard, Contention, Status, Scheduler, Schedule, Job, Progress, Observer, View;
    full: Tenure, Loss, Error, ErrorKind;
    // Values.
    full: ContenderId, FencingToken, Lease, MutexName, MutexOwner, MutexState, ConnectUrl, Host;
    // Backends.
    full: MemoryBackend, Arc<dyn Backend>, Box<dyn Backend>, Answer, Claim, Intent, Ownership, Prior;
    full: MutexRecord, EvictIf, Eviction, Probe, Finding, &'static dyn Operate;
    full: Wakeups<MutexName>, Subscription<MutexName>, Demand<MutexName>;
    // Time.
    full: Moment, SystemClock, TokioClock, Arc<dyn Clock>;
    // Without a runtime.
    full: blocking::Simba, blocking::Locker, blocking::Guard, blocking::Contention, blocking::Observer;
    full: blocking::Scheduler, blocking::Job;
    // Not shared.
    send: Box<dyn Session>, clock::Sleep;
}

const _: fn() = || {
    assert_not!(value::<Box<dyn Session>>(), Sync);
    assert_not!(value::<clock::Sleep>(), Sync);
    // A locker has one guard at a time, and a guard is unique.
    assert_not!(value::<Locker>(), Clone);
    assert_not!(value::<Guard>(), Clone);
    assert_not!(value::<Contention>(), Clone);
    assert_not!(value::<Job>(), Clone);
    assert_not!(value::<Observer>(), Clone);
};

/// Checks futures: `Send`, `Sync` for `shared`, and not `Unpin`.
macro_rules! futures {
    ($($kind:ident: $($future:expr),+;)+) => {
        const _: fn() = || { $($({
            let future = $future;
            $kind(&future);
            assert_not!(future, Unpin);
        })+)+ };
    };
}

futures! {
    shared: value::<&Contention>().stop(), value::<&Contention>().acquired();
    shared: value::<&Job>().stop(), value::<&mut Observer>().changed(), value::<Guard>().release();
    shared: value::<&Locker>().lock(), value::<&Locker>().try_lock();
    shared: value::<&Wakeups<MutexName>>().demand(), value::<&mut Subscription<MutexName>>().notified();
    // These wait on a clock, whose sleeps are not `Sync`.
    sent: value::<&Locker>().lock_timeout(value::<Duration>()), value::<&Simba>().shutdown();
    sent: value::<&Tenure>().expiring(), value::<&Tenure>().lost();
    sent: value::<&Guard>().expiring(), value::<&Guard>().lost();
    // The auto traits of the work decide.
    sent: value::<&Tenure>().run(value::<Ready<()>>()), value::<&Guard>().run(value::<Ready<()>>());
}

const _: fn() = || {
    let (tenure, guard) = (value::<&Tenure>(), value::<&Guard>());
    assert_not!(tenure.run(value::<Ready<Rc<()>>>()), Send);
    assert_not!(guard.run(value::<Ready<Rc<()>>>()), Send);
};

// The futures of a backend run on the threads of the engine.
const _: fn() = || {
    fn boxed<F: Future + Send + Unpin>(_: &F) {}
    boxed(&value::<&dyn Backend>().open(value()));
    boxed(&value::<&dyn Backend>().close());
    boxed(&value::<&mut dyn Session>().contend(value()));
    boxed(&value::<&mut dyn Session>().inspect());
    boxed(&value::<&mut dyn Session>().release(Holding::Unknown));
    boxed(&value::<&mut dyn Session>().changed());
    boxed(&value::<&dyn Operate>().list());
    boxed(&value::<&dyn Operate>().read(value()));
    boxed(&value::<&dyn Operate>().evict(value(), value()));
    boxed(&value::<&dyn Operate>().probe());
    boxed(&value::<&dyn Operate>().apply_schema());
    boxed(&value::<&dyn Clock>().sleep_until(value()));
};

// `Error` converts to a boxed error.
const _: fn() = || {
    fn error<E: std::error::Error + Send + Sync + 'static>() {}
    error::<Error>();
    let _: Box<dyn std::error::Error + Send + Sync> = value::<Error>().into();
};

/// A handle and all that was created from it can move to another thread of a runtime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_handles_work_from_another_thread() {
    let simba = Simba::new(MemoryBackend::new());
    let (locker, contention) = (simba.locker("a"), simba.contend("b"));
    let mut observer = simba.observe("a").unwrap();
    let job = simba
        .scheduler("c")
        .start(Schedule::fixed_rate(Duration::from_secs(1)).unwrap(), |_| async { Ok::<(), Error>(()) });
    let task = tokio::spawn(async move {
        let guard = locker.lock().await.unwrap();
        contention.start().unwrap();
        let tenure = contention.acquired().await.unwrap();
        let leading = job.as_ref().unwrap().acquired().await.unwrap();
        observer.changed().await.unwrap();
        assert!(guard.is_held() && tenure.is_held() && leading.is_held());
        (guard, contention, job)
    });
    let (guard, contention, job) = task.await.unwrap();
    guard.release().await.unwrap();
    contention.stop().await.unwrap();
    job.unwrap().stop().await.unwrap();
    simba.shutdown().await;
}
