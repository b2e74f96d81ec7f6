//! Keeps one connection to a store open.
//!
//! A [`Connector`] says how to open a connection to one endpoint and how to run it. [`Supervised::run`] does the rest, in
//! the same way for every store: it tries the endpoints in turn, publishes the connection, detects its end, and
//! reconnects with a growing pause.
//!
//! | state | when | what a call that needs the connection does |
//! |---|---|---|
//! | connecting | before the first attempt, after a connection that was in use ended, and after the first that ended at once | waits, for as long as its caller allows |
//! | up | from the end of [`Connector::connect`] to the end of [`Connector::serve`] | uses it |
//! | failing | no endpoint accepted a connection, or connections end at once again and again | fails with the reason |
//! | closed | after [`Supervised::close`] | fails with [`ErrorKind::Closed`] |
//!
//! A backend creates a [`Supervised`], spawns [`Supervised::run`] on a task of its own, and closes it when it is closed or
//! dropped itself. A [`Connection`] is what calls need, such as a channel to the task; the socket stays with the
//! connector, which keeps it from [`Connector::connect`] to [`Connector::serve`].
//!
//! A call in flight on a connection that ends is the connection's business: its future has to fail, with an outcome that
//! is unknown to the caller. A connection in an unknown state, such as one whose call was dropped half-way, must end
//! rather than be used again.

use std::fmt;
use std::time::Duration;

use simba_core::spi::within;
use simba_core::{Clock, Error, ErrorKind, Result};
use tokio::sync::watch;

use crate::Backoff;
use crate::error::{closed, timed_out};

/// Opens and runs the connections of one kind.
pub trait Connector: Send {
    /// A handle on an open connection.
    type Connection: Connection;

    /// Returns the number of endpoints. If there is none, calls fail with [`ErrorKind::Invalid`].
    fn endpoints(&self) -> usize {
        1
    }

    /// Returns the longest time that one attempt may take.
    fn limit(&self) -> Duration;

    /// Returns the longest pause that is acceptable now, if that is shorter than [`Retry::max_pause`]: a short lease in
    /// use leaves little time.
    fn max_pause(&self) -> Duration {
        Duration::MAX
    }

    /// Returns the error of an attempt that took longer than the limit.
    fn timed_out(&self, endpoint: usize, limit: Duration) -> Error {
        let _ = endpoint;
        timed_out(limit)
    }

    /// Opens a connection to the endpoint with this index: dials, greets and logs in.
    ///
    /// # Errors
    ///
    /// Why this endpoint cannot be used. A transient error lets the next endpoint be tried at once.
    ///
    /// # Cancel safety
    ///
    /// Dropped when the limit has passed or the handle is closed; it must leave no connection behind.
    fn connect(&mut self, endpoint: usize) -> impl Future<Output = Result<Self::Connection>> + Send;

    /// Runs a connection until it ends, and returns why it ended.
    ///
    /// Calls may use the connection as soon as this is called. Wake every session here: any message may have been missed
    /// while there was no connection.
    ///
    /// # Cancel safety
    ///
    /// Dropped when the handle is closed. The connection has to end with it.
    fn serve(&mut self, connection: &Self::Connection) -> impl Future<Output = Error> + Send;

    /// Returns whether a connection that ended could be used by calls. One that could not counts as a failed attempt,
    /// however long it lasted: a server may take its time to refuse a client.
    fn was_usable(&self, _connection: &Self::Connection) -> bool {
        true
    }

    /// Runs during the pause after this error, for a store whose calls are queued rather than sent on the connection by
    /// their callers. The pause ends when this completes; by default it never does.
    ///
    /// # Cancel safety
    ///
    /// Dropped when the pause is over.
    fn pause(&mut self, error: &Error) -> impl Future<Output = ()> + Send {
        let _ = error;
        std::future::pending()
    }
}

/// A handle on an open connection, shared by the calls that use it.
pub trait Connection: Clone + Send + Sync + 'static {
    /// Returns whether new calls may use the connection. A connection that broke is not open, even before its supervisor
    /// notices.
    fn is_open(&self) -> bool {
        true
    }
}

/// How [`Supervised::run`] spaces its attempts.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct Retry {
    /// The pause after the first failed round over all endpoints.
    pub first_pause: Duration,
    /// The longest pause.
    pub max_pause: Duration,
    /// The shortest pause after a permanent error, which lasts until the setup is fixed.
    pub permanent_pause: Duration,
    /// A connection that ends sooner counts as a failed attempt: there is a pause before the next one. Calls wait through
    /// the pause after the first such connection, and fail after the next ones.
    pub stable_after: Duration,
    /// Whether the attempt after a connection begins with the next endpoint. Otherwise it begins with the same one.
    pub rotate: bool,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            first_pause: Duration::from_millis(20),
            max_pause: Duration::from_secs(1),
            permanent_pause: Duration::from_millis(500),
            stable_after: Duration::from_millis(100),
            rotate: false,
        }
    }
}

/// The state of a supervised connection. See the [module documentation](self).
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_enums)]
pub enum State<C> {
    /// A connection is being opened.
    Connecting,
    /// There is a connection.
    Up(C),
    /// No connection can be opened for now.
    Failing(Error),
    /// The handle was closed.
    Closed,
}

/// A connection that is replaced when it ends. See the [module documentation](self).
pub struct Supervised<C> {
    state: watch::Sender<State<C>>,
}

impl<C: Connection> Supervised<C> {
    /// Creates the state of a connection that [`run`](Self::run) opens.
    #[must_use]
    pub fn new() -> Self {
        Self { state: watch::Sender::new(State::Connecting) }
    }

    /// Returns the connection. Waits while one is being opened.
    ///
    /// # Errors
    ///
    /// No connection can be opened, or the handle is closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn connection(&self) -> Result<C> {
        match self.current() {
            Some(connection) => Ok(connection),
            None => self.next_connection().await,
        }
    }

    async fn next_connection(&self) -> Result<C> {
        let mut states = self.state.subscribe();
        loop {
            match &*states.borrow_and_update() {
                State::Up(connection) if connection.is_open() => return Ok(connection.clone()),
                State::Failing(error) => return Err(error.clone()),
                State::Closed => return Err(closed()),
                State::Up(_) | State::Connecting => {}
            }
            states.changed().await.map_err(|_| closed())?;
        }
    }

    /// Returns the connection, if there is one that new calls may use.
    #[must_use]
    pub fn current(&self) -> Option<C> {
        match &*self.state.borrow() {
            State::Up(connection) if connection.is_open() => Some(connection.clone()),
            _ => None,
        }
    }

    /// Returns a receiver that follows the state.
    #[must_use]
    pub fn states(&self) -> watch::Receiver<State<C>> {
        self.state.subscribe()
    }

    /// Closes the connection for good: [`run`](Self::run) ends, and every call fails from now on.
    pub fn close(&self) {
        self.state.send_replace(State::Closed);
    }

    /// Opens a connection and replaces it when it ends, until the handle is closed.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the connection. The state is closed then, so that no call waits for another one.
    pub async fn run<K>(&self, connector: &mut K, clock: &dyn Clock, retry: Retry)
    where
        K: Connector<Connection = C>,
    {
        let _closes = CloseOnDrop(self);
        let mut states = self.state.subscribe();
        tokio::select! {
            biased;
            _ = states.wait_for(|state| matches!(state, State::Closed)) => {}
            () = self.reconnect_forever(connector, clock, retry) => {}
        }
    }

    async fn reconnect_forever<K>(&self, connector: &mut K, clock: &dyn Clock, retry: Retry)
    where
        K: Connector<Connection = C>,
    {
        let mut backoff = Backoff::new(retry.first_pause, retry.max_pause);
        let (mut first, mut ended_at_once) = (0, false);
        loop {
            let (error, calls_wait) = match connect_any(connector, clock, first).await {
                Ok((endpoint, connection)) => {
                    first = if retry.rotate { endpoint + 1 } else { endpoint };
                    self.set(State::Up(connection.clone()));
                    let (began, error) = (clock.now(), connector.serve(&connection).await);
                    tracing::debug!(%error, "the connection ended");
                    let was_usable = connector.was_usable(&connection);
                    if was_usable && clock.now() - began >= retry.stable_after {
                        self.set(State::Connecting);
                        ended_at_once = false;
                        backoff.reset();
                        continue;
                    }
                    (error, was_usable && !std::mem::replace(&mut ended_at_once, true))
                }
                Err(error) => (error, false),
            };
            let pause = backoff.pause().min(connector.max_pause());
            let pause = if error.is_transient() { pause } else { pause.max(retry.permanent_pause) };
            tracing::debug!(%error, ?pause, "no connection");
            self.set(if calls_wait { State::Connecting } else { State::Failing(error.clone()) });
            within(clock, pause, connector.pause(&error)).await;
        }
    }

    /// Sets the state, unless the handle is closed.
    fn set(&self, to: State<C>) {
        self.state.send_if_modified(|state| {
            let open = !matches!(state, State::Closed);
            if open {
                *state = to;
            }
            open
        });
    }
}

/// Tries every endpoint once, from `first` on, until one accepts a connection.
///
/// # Errors
///
/// The first permanent error if every endpoint has one, since nothing helps until that is fixed. Otherwise the first
/// transient error: another round may succeed. A permanent error of another endpoint is its source.
/// [`ErrorKind::Invalid`] if there is no endpoint.
async fn connect_any<K: Connector>(
    connector: &mut K,
    clock: &dyn Clock,
    first: usize,
) -> Result<(usize, K::Connection)> {
    let count = connector.endpoints();
    let (mut transient, mut permanent) = (None, None);
    for endpoint in (first..first + count).map(|at| at % count) {
        let limit = connector.limit();
        let connected = within(clock, limit, connector.connect(endpoint)).await;
        match connected.unwrap_or_else(|| Err(connector.timed_out(endpoint, limit))) {
            Ok(connection) => return Ok((endpoint, connection)),
            Err(error) if error.is_transient() => transient = transient.or(Some(error)),
            Err(error) => permanent = permanent.or(Some(error)),
        }
    }
    Err(match (transient, permanent) {
        (Some(transient), Some(permanent)) => transient.with_source(permanent),
        (Some(error), None) | (None, Some(error)) => error,
        (None, None) => Error::new(ErrorKind::Invalid, "no server to connect to: name at least one"),
    })
}

/// Pings a connection at every `interval`. Completes when a ping failed or was not answered within `limit`.
///
/// A half-open connection reports no error by itself: without pings, a session that waits for messages would wait for
/// ever.
///
/// # Cancel safety
///
/// Dropping it drops a ping in progress. A new call begins with a whole interval.
pub async fn ping_until_silent<F>(
    clock: &dyn Clock,
    interval: Duration,
    limit: Duration,
    mut ping: impl FnMut() -> F + Send,
) -> Error
where
    F: Future<Output = Result<()>> + Send,
{
    loop {
        clock.sleep_until(clock.now() + interval).await;
        match within(clock, limit, ping()).await {
            Some(Ok(())) => {}
            Some(Err(error)) => return error,
            None => return timed_out(limit),
        }
    }
}

impl<C: Connection> Default for Supervised<C> {
    fn default() -> Self {
        Self::new()
    }
}

impl<C> fmt::Debug for Supervised<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervised").finish_non_exhaustive()
    }
}

struct CloseOnDrop<'a, C: Connection>(&'a Supervised<C>);

impl<C: Connection> Drop for CloseOnDrop<'_, C> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, PoisonError};

    use futures_util::FutureExt as _;
    use simba_core::TokioClock;
    use tokio::sync::Notify;

    use super::*;

    /// A connection that the test ends.
    #[derive(Clone, Debug)]
    struct Line {
        endpoint: usize,
        end: Arc<Notify>,
        broken: Arc<AtomicBool>,
    }

    impl Connection for Line {
        fn is_open(&self) -> bool {
            !self.broken.load(Ordering::SeqCst)
        }
    }

    /// What each endpoint does with an attempt, and which were tried.
    #[derive(Default)]
    struct Endpoints {
        outcomes: Vec<Outcome>,
        tried: Arc<Mutex<Vec<usize>>>,
        max_pause: Option<Duration>,
        paused_for: Arc<Mutex<Vec<ErrorKind>>>,
        /// Ends a pause.
        resume: Arc<Notify>,
    }

    #[derive(Clone, Copy)]
    enum Outcome {
        Accepts,
        EndsAtOnce,
        /// Accepts the connection, and refuses its use after a second.
        RefusesLate,
        Refuses(ErrorKind),
        Hangs,
    }

    const LIMIT: Duration = Duration::from_secs(2);

    impl Endpoints {
        fn new(outcomes: &[Outcome]) -> Self {
            Self { outcomes: outcomes.to_vec(), ..Self::default() }
        }
    }

    impl Connector for Endpoints {
        type Connection = Line;

        fn endpoints(&self) -> usize {
            self.outcomes.len()
        }

        fn limit(&self) -> Duration {
            LIMIT
        }

        fn max_pause(&self) -> Duration {
            self.max_pause.unwrap_or(Duration::MAX)
        }

        fn timed_out(&self, endpoint: usize, limit: Duration) -> Error {
            Error::new(ErrorKind::Unavailable, format!("{endpoint} is silent for {limit:?}"))
        }

        async fn connect(&mut self, endpoint: usize) -> Result<Line> {
            self.tried.lock().unwrap_or_else(PoisonError::into_inner).push(endpoint);
            match self.outcomes[endpoint] {
                Outcome::Accepts | Outcome::EndsAtOnce | Outcome::RefusesLate => {
                    Ok(Line { endpoint, end: Arc::default(), broken: Arc::default() })
                }
                Outcome::Refuses(kind) => Err(Error::new(kind, format!("refused by {endpoint}"))),
                Outcome::Hangs => std::future::pending().await,
            }
        }

        async fn serve(&mut self, line: &Line) -> Error {
            match self.outcomes[line.endpoint] {
                Outcome::EndsAtOnce => {}
                Outcome::RefusesLate => tokio::time::sleep(Duration::from_secs(1)).await,
                _ => line.end.notified().await,
            }
            Error::new(ErrorKind::Unavailable, "the connection broke")
        }

        fn was_usable(&self, line: &Line) -> bool {
            !matches!(self.outcomes[line.endpoint], Outcome::RefusesLate)
        }

        async fn pause(&mut self, error: &Error) {
            self.paused_for.lock().unwrap_or_else(PoisonError::into_inner).push(error.kind());
            self.resume.notified().await;
        }
    }

    /// Runs `test` beside the supervisor.
    async fn supervised<T>(
        outcomes: &[Outcome],
        retry: Retry,
        test: impl AsyncFnOnce(&Supervised<Line>, Arc<Mutex<Vec<usize>>>) -> T,
    ) -> T {
        let (clock, supervised) = (TokioClock::new(), Supervised::new());
        let mut endpoints = Endpoints::new(outcomes);
        let tried = Arc::clone(&endpoints.tried);
        tokio::select! {
            biased;
            outcome = test(&supervised, tried) => outcome,
            () = supervised.run(&mut endpoints, &clock, retry) => panic!("it ended before the test"),
        }
    }

    fn tried(tried: &Mutex<Vec<usize>>) -> Vec<usize> {
        tried.lock().unwrap().clone()
    }

    #[tokio::test(start_paused = true)]
    async fn endpoints_are_tried_in_turn_and_a_silent_one_costs_its_limit() {
        let outcomes = [Outcome::Refuses(ErrorKind::Unavailable), Outcome::Hangs, Outcome::Accepts];
        let began = tokio::time::Instant::now();
        supervised(&outcomes, Retry::default(), async |supervised, all| {
            assert_eq!(supervised.connection().await.unwrap().endpoint, 2);
            assert_eq!((tried(&all), began.elapsed()), (vec![0, 1, 2], LIMIT));
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn error_is_permanent_only_if_that_of_every_endpoint_is() {
        use std::error::Error as _;
        let (transient, denied) =
            (Outcome::Refuses(ErrorKind::Unavailable), Outcome::Refuses(ErrorKind::Denied));
        for (outcomes, wanted) in [
            ([denied, denied], ErrorKind::Denied),
            ([denied, transient], ErrorKind::Unavailable),
            ([transient, denied], ErrorKind::Unavailable),
        ] {
            supervised(&outcomes, Retry::default(), async |supervised, _| {
                let error = supervised.connection().await.unwrap_err();
                assert_eq!(error.kind(), wanted, "{error}");
                assert_eq!(error.source().is_some(), wanted == ErrorKind::Unavailable, "it says what to fix");
                assert!(supervised.current().is_none());
            })
            .await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_endpoints_calls_fail_at_once_and_the_error_names_the_fix() {
        supervised(&[], Retry::default(), async |supervised, all| {
            let began = tokio::time::Instant::now();
            let error = supervised.connection().await.unwrap_err();
            assert_eq!((error.kind(), began.elapsed()), (ErrorKind::Invalid, Duration::ZERO));
            assert!(error.to_string().contains("name at least one"), "{error}");
            assert!(tried(&all).is_empty());
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn error_of_a_silent_endpoint_names_it() {
        supervised(&[Outcome::Hangs], Retry::default(), async |supervised, _| {
            let error = supervised.connection().await.unwrap_err();
            assert!(error.to_string().contains("0 is silent for 2s"), "{error}");
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_are_as_short_as_the_connector_needs() {
        let (clock, supervised) = (TokioClock::new(), Supervised::new());
        let mut endpoints = Endpoints::new(&[Outcome::Refuses(ErrorKind::Unavailable)]);
        endpoints.max_pause = Some(Duration::from_millis(50));
        let tried = Arc::clone(&endpoints.tried);
        let run = supervised.run(&mut endpoints, &clock, Retry::default());
        assert!(tokio::time::timeout(Duration::from_secs(5), run).await.is_err());
        assert!(tried.lock().unwrap().len() >= 99, "{tried:?}");
        let paused_for = endpoints.paused_for.lock().unwrap();
        assert_eq!(paused_for.len(), tried.lock().unwrap().len(), "the connector runs in every pause");
        assert!(paused_for.iter().all(|kind| *kind == ErrorKind::Unavailable));
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_while_no_endpoint_accepts() {
        let outcomes = [Outcome::Refuses(ErrorKind::Unavailable)];
        supervised(&outcomes, Retry::default(), async |_, all| {
            tokio::time::sleep(Duration::from_secs(10)).await;
            let attempts = tried(&all).len();
            assert!((10..=30).contains(&attempts), "{attempts} attempts in ten seconds");
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_was_in_use_is_replaced_at_once_and_calls_wait_for_it() {
        supervised(&[Outcome::Accepts], Retry::default(), async |supervised, _| {
            let first = supervised.connection().await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let began = tokio::time::Instant::now();
            first.broken.store(true, Ordering::SeqCst);
            assert!(supervised.current().is_none(), "a broken connection is not used");
            let mut next = Box::pin(supervised.connection());
            assert!(next.as_mut().now_or_never().is_none(), "the call waits");
            first.end.notify_one();
            assert!(next.await.unwrap().is_open());
            assert_eq!(began.elapsed(), Duration::ZERO);
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_end_at_once_are_not_reopened_in_a_hot_loop() {
        supervised(&[Outcome::EndsAtOnce], Retry::default(), async |supervised, all| {
            tokio::time::sleep(Duration::from_secs(10)).await;
            let attempts = tried(&all).len();
            assert!((10..=30).contains(&attempts), "{attempts} attempts in ten seconds");
            assert!(supervised.connection().await.is_err());
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn calls_wait_for_the_next_connection_after_the_first_that_ends_at_once() {
        supervised(&[Outcome::Accepts], Retry::default(), async |supervised, all| {
            let first = supervised.connection().await.unwrap();
            first.broken.store(true, Ordering::SeqCst);
            first.end.notify_one();
            tokio::task::yield_now().await;
            assert!(supervised.connection().await.unwrap().is_open());
            assert_eq!(tried(&all).len(), 2);
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_no_call_could_use_fails_calls_and_delays_the_next_attempt() {
        supervised(&[Outcome::RefusesLate], Retry::default(), async |supervised, all| {
            tokio::time::sleep(Duration::from_millis(1_001)).await;
            assert!(supervised.connection().await.is_err(), "the call does not wait for the next connection");
            tokio::time::sleep(Duration::from_secs(19)).await;
            let attempts = tried(&all).len();
            assert!((10..=15).contains(&attempts), "{attempts} attempts in twenty seconds: pauses grow");
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn rotation_begins_with_the_next_endpoint_after_a_connection() {
        for (rotate, wanted) in [(true, 1), (false, 0)] {
            let retry = Retry { rotate, ..Retry::default() };
            supervised(&[Outcome::Accepts, Outcome::Accepts], retry, async |supervised, _| {
                let first = supervised.connection().await.unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
                first.broken.store(true, Ordering::SeqCst);
                first.end.notify_one();
                assert_eq!(supervised.connection().await.unwrap().endpoint, wanted);
            })
            .await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn close_ends_the_supervisor_and_fails_calls() {
        let (clock, supervised) = (TokioClock::new(), Supervised::new());
        let mut endpoints = Endpoints::new(&[Outcome::Hangs]);
        let call = async {
            let call = supervised.connection();
            supervised.close();
            call.await
        };
        let (call, ()) = tokio::join!(call, supervised.run(&mut endpoints, &clock, Retry::default()));
        assert_eq!(call.unwrap_err().kind(), ErrorKind::Closed);
        // A dropped supervisor, as of a runtime that ended, leaves no call waiting.
        let supervised = Supervised::<Line>::new();
        assert!(supervised.run(&mut endpoints, &clock, Retry::default()).now_or_never().is_none());
        assert_eq!(supervised.connection().await.unwrap_err().kind(), ErrorKind::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn close_ends_an_attempt_a_connection_and_a_pause_at_once() {
        for outcome in [Outcome::Hangs, Outcome::Accepts, Outcome::Refuses(ErrorKind::Unavailable)] {
            let (clock, supervised) = (TokioClock::new(), Supervised::new());
            let mut endpoints = Endpoints::new(&[outcome]);
            let tried = Arc::clone(&endpoints.tried);
            let closing = async {
                // Shorter than the limit of an attempt, and than the first pause.
                tokio::time::sleep(Duration::from_millis(1)).await;
                assert_eq!(supervised.current().is_some(), matches!(outcome, Outcome::Accepts));
                supervised.close();
                tokio::time::Instant::now()
            };
            let run = supervised.run(&mut endpoints, &clock, Retry::default());
            let both = tokio::time::timeout(LIMIT, async { tokio::join!(closing, run) });
            let (closed, ()) = both.await.expect("the supervisor ends");
            assert_eq!((closed.elapsed(), tried.lock().unwrap().len()), (Duration::ZERO, 1));
            assert!(supervised.current().is_none());
            assert_eq!(supervised.connection().await.unwrap_err().kind(), ErrorKind::Closed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_after_a_permanent_error_have_a_minimum() {
        let pause = Duration::from_millis(1);
        let retry = Retry { first_pause: pause, max_pause: pause, ..Retry::default() };
        for (kind, wanted) in [(ErrorKind::Denied, 20..=21), (ErrorKind::Unavailable, 1_000..=100_000)] {
            supervised(&[Outcome::Refuses(kind)], retry, async |_, all| {
                tokio::time::sleep(retry.permanent_pause * 20).await;
                let attempts = tried(&all).len();
                assert!(wanted.contains(&attempts), "{attempts} attempts in 20 pauses after {kind:?}");
            })
            .await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn connector_can_end_a_pause() {
        let hour = Duration::from_secs(3_600);
        let retry = Retry { first_pause: hour, max_pause: hour, ..Retry::default() };
        let (clock, supervised) = (TokioClock::new(), Supervised::<Line>::new());
        let mut endpoints = Endpoints::new(&[Outcome::Refuses(ErrorKind::Unavailable)]);
        let (tried, resume) = (Arc::clone(&endpoints.tried), Arc::clone(&endpoints.resume));
        let began = tokio::time::Instant::now();
        let mut run = std::pin::pin!(supervised.run(&mut endpoints, &clock, retry));
        for attempts in 1..=3 {
            assert!(run.as_mut().now_or_never().is_none());
            assert_eq!((tried.lock().unwrap().len(), began.elapsed()), (attempts, Duration::ZERO));
            resume.notify_one();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pings_end_with_the_first_that_fails_or_is_not_answered() {
        let (clock, second) = (TokioClock::new(), Duration::from_secs(1));
        let began = tokio::time::Instant::now();
        let mut pings = 0;
        let silent = ping_until_silent(&clock, second, LIMIT, || {
            pings += 1;
            let answered = pings < 3;
            async move { if answered { Ok(()) } else { std::future::pending().await } }
        });
        assert_eq!(silent.await.kind(), ErrorKind::Unavailable);
        assert_eq!(began.elapsed(), second * 3 + LIMIT);
        let failed = || async { Err(Error::new(ErrorKind::Denied, "no")) };
        assert_eq!(ping_until_silent(&clock, second, LIMIT, failed).await.kind(), ErrorKind::Denied);
    }
}
