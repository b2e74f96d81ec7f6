//! Waiting for a future on a plain thread.

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

/// Waits for `future` on this thread, without a runtime.
///
/// Enough for the futures that this crate hands out: they only listen, to timers and to tasks that run
/// elsewhere. Unlike a runtime's `block_on` it works on any thread.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    // On a runtime's thread the task around us may have no budget left, and never gets more while we wait.
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
