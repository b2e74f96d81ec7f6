//! Blocking on a future without a runtime.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Blocks this thread until `future` completes, without a runtime.
///
/// Sufficient for the futures of this crate, which only wait for timers and for tasks that run elsewhere. Unlike a
/// runtime's `block_on` it works on any thread.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    // On a runtime's thread the current task may have no coop budget left, and gets none while it is blocked.
    let mut future = pin!(tokio::task::unconstrained(future));
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
