use std::future::Future;
use std::time::Duration;

use tokio::time::{sleep, timeout};

/// Time limit for operations that need no waiting. A busy machine needs less. The first poll or renewal under
/// [`long`](crate::long) comes later.
pub const SOON: Duration = Duration::from_secs(20);
/// The pause between two checks of a state that sends no signal.
const PAUSE: Duration = Duration::from_millis(5);

/// Awaits the future. Panics with `expectation` if it takes longer than [`SOON`].
pub async fn soon<F: Future>(expectation: &str, future: F) -> F::Output {
    within(SOON, expectation, Box::pin(future)).await
}

/// Awaits the future. Panics with `expectation` if it takes longer than `limit`.
pub async fn within<F: Future>(limit: Duration, expectation: &str, future: F) -> F::Output {
    let output = timeout(limit, Box::pin(future)).await;
    output.unwrap_or_else(|_| panic!("broken: {expectation} (not within {limit:?})"))
}

/// Polls a state that sends no signal. Panics with `expectation` after [`SOON`].
pub async fn until(expectation: &str, reached: impl FnMut() -> bool) {
    until_within(SOON, expectation, reached).await;
}

/// Polls a state that sends no signal. Panics with `expectation` after `limit`.
pub async fn until_within(limit: Duration, expectation: &str, mut reached: impl FnMut() -> bool) {
    let poll = async {
        while !reached() {
            sleep(PAUSE).await;
        }
    };
    within(limit, expectation, poll).await;
}
