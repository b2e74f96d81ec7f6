//! Time limits for futures.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;

use super::{Clock, Moment, Sleep};
use crate::seeded::{self, Bug};

/// Runs `work` for at most `limit` on this clock, counted from this call. Returns `None` if it did not end by then.
///
/// # Cancel safety
///
/// As that of `work`, which is dropped when the time has passed.
pub fn within<F: Future>(
    clock: &dyn Clock,
    limit: Duration,
    work: F,
) -> impl Future<Output = Option<F::Output>> {
    by(clock, clock.now() + limit, work)
}

/// Runs `work` until `end` on this clock at most. Returns `None` if it did not end by then.
pub(crate) fn by<F: Future>(clock: &dyn Clock, end: Moment, work: F) -> By<'_, F> {
    By { clock, end, sleep: None, work }
}

pin_project! {
    /// A future without `async fn`, which stores its arguments twice: every call to a store is in one of these.
    pub(crate) struct By<'a, F> {
        clock: &'a dyn Clock,
        end: Moment,
        // Created at the first pending poll: work that is ready at once needs no timer.
        sleep: Option<Sleep>,
        #[pin]
        work: F,
    }
}

impl<F: Future> Future for By<'_, F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.work.poll(context) {
            return Poll::Ready(Some(output));
        }
        if seeded::on(Bug::NoCallLimit) {
            return Poll::Pending;
        }
        let (clock, end) = (*this.clock, *this.end);
        this.sleep.get_or_insert_with(|| clock.sleep_until(end)).as_mut().poll(context).map(|()| None)
    }
}
