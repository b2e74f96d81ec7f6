use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt as _;
use simba_core::TokioClock;
use tokio::sync::Semaphore;

use super::*;

const LIMITS: BatchLimits =
    BatchLimits { calls: 3, in_flight: 1, time: Duration::from_secs(1), window: Duration::ZERO };

/// A server that answers a request when the test permits it, and records what it was sent.
struct Server {
    requests: Mutex<Vec<Vec<u32>>>,
    permits: Semaphore,
    fails: AtomicUsize,
}

impl Server {
    fn new(permits: usize) -> Self {
        Self { requests: Mutex::default(), permits: Semaphore::new(permits), fails: AtomicUsize::new(0) }
    }

    fn requests(&self) -> Vec<Vec<u32>> {
        self.requests.lock().unwrap().clone()
    }
}

impl SendBatch for Server {
    type Call = u32;
    type Answer = u32;

    async fn send(&self, calls: &[u32]) -> Result<Answers<u32>, BatchError> {
        self.requests.lock().unwrap().push(calls.to_vec());
        self.permits.acquire().await.unwrap().forget();
        if self.fails.load(Ordering::SeqCst) > 0 {
            self.fails.fetch_sub(1, Ordering::SeqCst);
            return Err(BatchError::RetryAlone(Error::new(ErrorKind::Unavailable, "one call is bad")));
        }
        Ok(calls.iter().map(|call| Ok(call * 10)).collect())
    }
}

/// A server that answers each request at once, by the number of its calls.
struct Immediate {
    requests: AtomicUsize,
    reply: fn(usize) -> Result<Answers<u32>, BatchError>,
}

impl Immediate {
    fn new(reply: fn(usize) -> Result<Answers<u32>, BatchError>) -> Self {
        Self { requests: AtomicUsize::new(0), reply }
    }
}

impl SendBatch for Immediate {
    type Call = u32;
    type Answer = u32;

    async fn send(&self, calls: &[u32]) -> Result<Answers<u32>, BatchError> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        (self.reply)(calls.len())
    }
}

fn batcher(limits: BatchLimits) -> Batcher<u32, u32> {
    Batcher::new(Arc::new(TokioClock::new()), limits)
}

/// Polls the runner until it has nothing more to do.
async fn settle(mut run: Pin<&mut impl Future<Output = ()>>) {
    for _ in 0..20 {
        assert!(run.as_mut().now_or_never().is_none(), "it never ends");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_lone_call_is_sent_at_once_from_its_own_task() {
    let (batcher, server) = (batcher(LIMITS), Server::new(1));
    assert_eq!(batcher.call(&server, 7).await.unwrap(), 70, "without run");
}

#[tokio::test(start_paused = true)]
async fn calls_that_arrive_during_a_request_share_the_next_ones() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut run = std::pin::pin!(batcher.run(&server));
    let mut calls: Vec<_> = (1..=5).map(|call| Box::pin(batcher.call(&server, call))).collect();
    for call in &mut calls {
        assert!(call.as_mut().now_or_never().is_none());
    }
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [[1]], "one request in flight at a time");
    server.permits.add_permits(3);
    assert_eq!(calls.remove(0).await.unwrap(), 10);
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [vec![1], vec![2, 3, 4], vec![5]]);
    for (call, wanted) in calls.into_iter().zip([20, 30, 40, 50]) {
        assert_eq!(call.await.unwrap(), wanted, "each call gets its own answer");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_is_never_sent() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut run = std::pin::pin!(batcher.run(&server));
    let mut first = Box::pin(batcher.call(&server, 1));
    let mut dropped = Box::pin(batcher.call(&server, 2));
    let mut kept = Box::pin(batcher.call(&server, 3));
    for call in [&mut first, &mut dropped, &mut kept] {
        assert!(call.as_mut().now_or_never().is_none());
    }
    drop(dropped);
    server.permits.add_permits(2);
    assert_eq!(first.await.unwrap(), 10);
    settle(run.as_mut()).await;
    assert_eq!(kept.await.unwrap(), 30);
    assert_eq!(server.requests(), [[1], [3]]);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_lone_call_admits_the_next_request() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut run = std::pin::pin!(batcher.run(&server));
    let mut first = Box::pin(batcher.call(&server, 1));
    let mut second = Box::pin(batcher.call(&server, 2));
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    drop(first);
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [[1], [2]]);
}

/// Its caller may be a task that waits for something else, or a runtime that is not driven.
#[tokio::test(start_paused = true)]
async fn a_lone_call_that_nothing_polls_holds_up_others_until_its_limit() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let began = tokio::time::Instant::now();
    let mut first = Box::pin(batcher.call(&server, 1));
    assert!(first.as_mut().now_or_never().is_none());
    // One for each request: the semaphore is fair, and the first call waits for one.
    server.permits.add_permits(3);
    let others = async { tokio::join!(batcher.call(&server, 2), batcher.call(&server, 3)) };
    let answers = async {
        tokio::select! {
            () = batcher.run(&server) => unreachable!("it never ends"),
            (two, three) = others => (two.unwrap(), three.unwrap()),
        }
    };
    let answers = tokio::time::timeout(LIMITS.time * 10, answers).await.expect("the others are sent");
    assert_eq!((answers, began.elapsed()), ((20, 30), LIMITS.time));
    assert_eq!(server.requests(), [vec![1], vec![2, 3]]);
    assert_eq!(first.await.unwrap(), 10, "it was answered");
    assert_eq!(batcher.call(&server, 4).await.unwrap(), 40, "nothing is in flight any more");
}

/// Lets the first call in, then lets the others share a request that fails.
async fn with_failed_request<'a>(
    batcher: &'a Batcher<u32, u32>,
    server: &'a Server,
    others: &[u32],
) -> Vec<Pin<Box<impl Future<Output = Result<u32>> + 'a>>> {
    let mut first = Box::pin(batcher.call(server, 1));
    assert!(first.as_mut().now_or_never().is_none());
    let mut calls: Vec<_> = others.iter().map(|call| Box::pin(batcher.call(server, *call))).collect();
    calls.iter_mut().for_each(|call| assert!(call.as_mut().now_or_never().is_none()));
    server.permits.add_permits(1);
    assert_eq!(first.await.unwrap(), 10);
    server.fails.store(1, Ordering::SeqCst);
    calls
}

#[tokio::test(start_paused = true)]
async fn calls_of_a_bad_request_are_sent_again_alone() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut run = std::pin::pin!(batcher.run(&server));
    let others = with_failed_request(&batcher, &server, &[2, 3]).await;
    server.permits.add_permits(3);
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [vec![1], vec![2, 3], vec![2], vec![3]]);
    for (call, wanted) in others.into_iter().zip([20, 30]) {
        assert_eq!(call.await.unwrap(), wanted);
    }
}

/// The next call of its session may have been sent meanwhile, and must not be overtaken.
#[tokio::test(start_paused = true)]
async fn a_call_that_was_dropped_during_a_bad_request_is_not_sent_again() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut run = std::pin::pin!(batcher.run(&server));
    let mut others = with_failed_request(&batcher, &server, &[2, 3]).await;
    settle(run.as_mut()).await;
    drop(others.remove(0));
    server.permits.add_permits(2);
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [vec![1], vec![2, 3], vec![3]]);
    assert_eq!(others.remove(0).await.unwrap(), 30);
}

#[tokio::test(start_paused = true)]
async fn calls_made_after_a_bad_request_do_not_share_one_with_its_calls() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut run = std::pin::pin!(batcher.run(&server));
    let others = with_failed_request(&batcher, &server, &[2, 3]).await;
    settle(run.as_mut()).await;
    let mut later: Vec<_> = [4, 5].map(|call| Box::pin(batcher.call(&server, call))).into();
    later.iter_mut().for_each(|call| assert!(call.as_mut().now_or_never().is_none()));
    server.permits.add_permits(4);
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [vec![1], vec![2, 3], vec![2], vec![3], vec![4, 5]]);
    for (call, wanted) in others.into_iter().zip([20, 30]) {
        assert_eq!(call.await.unwrap(), wanted);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_fails_after_its_limit_and_admits_the_next() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let began = tokio::time::Instant::now();
    let error = batcher.call(&server, 1).await.unwrap_err();
    assert_eq!((error.kind(), began.elapsed()), (ErrorKind::Unavailable, LIMITS.time));
    server.permits.add_permits(1);
    assert_eq!(batcher.call(&server, 2).await.unwrap(), 20);
}

#[tokio::test(start_paused = true)]
async fn calls_of_a_dropped_runner_fail_and_the_next_runner_sends() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut first = Box::pin(batcher.call(&server, 1));
    let mut second = Box::pin(batcher.call(&server, 2));
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    drop(first);
    assert!(batcher.run(&server).now_or_never().is_none(), "it sends the second call");
    assert_eq!(second.await.unwrap_err().kind(), ErrorKind::Closed);
    server.permits.add_permits(1);
    assert_eq!(batcher.call(&server, 3).await.unwrap(), 30, "no request is in flight any more");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_not_sent_yet_waits_for_the_next_runner() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut first = Box::pin(batcher.call(&server, 1));
    let mut second = Box::pin(batcher.call(&server, 2));
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    assert!(batcher.run(&server).now_or_never().is_none(), "one request is in flight already");
    server.permits.add_permits(2);
    assert_eq!(first.await.unwrap(), 10);
    assert!(second.as_mut().now_or_never().is_none() && server.requests() == [[1]], "no runner");
    tokio::select! {
        () = batcher.run(&server) => {}
        answer = second => assert_eq!(answer.unwrap(), 20),
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_with_another_number_of_answers_fails_all_its_calls() {
    for reply in [
        |_| Ok(vec![]),
        |calls| Ok((1..calls).map(|_| Ok(7)).collect()),
        |calls| Ok((0..=calls).map(|_| Ok(7)).collect()),
    ] as [fn(usize) -> _; 3]
    {
        let (batcher, server) = (batcher(LIMITS), Immediate::new(reply));
        assert_eq!(batcher.call(&server, 1).await.unwrap_err().kind(), ErrorKind::Protocol);
        let (two, three) = (batcher.call_batched(2), batcher.call_batched(3));
        let outcomes = tokio::select! {
            () = batcher.run(&server) => unreachable!("it never ends"),
            (two, three) = async { tokio::join!(two, three) } => [two, three],
        };
        assert!(outcomes.into_iter().all(|outcome| outcome.unwrap_err().kind() == ErrorKind::Protocol));
        assert_eq!(server.requests.load(Ordering::SeqCst), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn calls_of_a_failed_request_fail_and_are_not_sent_again() {
    let denied = |_| Err(Error::new(ErrorKind::Denied, "no permission").into());
    let (batcher, server) = (batcher(LIMITS), Immediate::new(denied));
    let (one, two) = (batcher.call_batched(1), batcher.call_batched(2));
    let mut run = std::pin::pin!(batcher.run(&server));
    settle(run.as_mut()).await;
    for outcome in [one.await, two.await] {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Denied);
    }
    settle(run.as_mut()).await;
    assert_eq!(server.requests.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn as_many_requests_are_in_flight_as_the_limit_allows() {
    let (batcher, server) = (batcher(BatchLimits { calls: 2, in_flight: 2, ..LIMITS }), Server::new(0));
    let calls: Vec<_> = (1..=7).map(|call| batcher.call_batched(call)).collect();
    let mut run = std::pin::pin!(batcher.run(&server));
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [[1, 2], [3, 4]]);
    server.permits.add_permits(1);
    settle(run.as_mut()).await;
    assert_eq!(server.requests(), [[1, 2], [3, 4], [5, 6]]);
    server.permits.add_permits(3);
    settle(run.as_mut()).await;
    for (call, wanted) in calls.into_iter().zip([10, 20, 30, 40, 50, 60, 70]) {
        assert_eq!(call.now_or_never().unwrap().unwrap(), wanted);
    }
}

#[tokio::test(start_paused = true)]
async fn limits_of_zero_count_as_one() {
    let limits = BatchLimits { calls: 0, in_flight: 0, ..LIMITS };
    // One permit: an empty request would use it.
    let (batcher, server) = (batcher(limits), Server::new(1));
    let call = tokio::time::timeout(LIMITS.time, batcher.call_batched(7));
    tokio::select! {
        () = batcher.run(&server) => {}
        answer = call => assert_eq!(answer.expect("it is sent").unwrap(), 70),
    }
    assert_eq!(server.requests(), [[7]]);
}

#[tokio::test(start_paused = true)]
async fn a_batched_call_that_is_dropped_before_its_first_poll_is_never_sent() {
    let (batcher, server) = (batcher(LIMITS), Server::new(2));
    let (dropped, kept) = (batcher.call_batched(1), batcher.call_batched(2));
    drop(dropped);
    tokio::select! {
        () = batcher.run(&server) => {}
        answer = kept => assert_eq!(answer.unwrap(), 20),
    }
    assert_eq!(server.requests(), [[2]]);
}

#[tokio::test(start_paused = true)]
async fn calls_within_the_window_share_a_request() {
    let window = Duration::from_millis(5);
    let (batcher, server) = (batcher(BatchLimits { window, ..LIMITS }), Server::new(2));
    let calls = async {
        let late = async {
            tokio::time::sleep(window / 2).await;
            batcher.call(&server, 2).await
        };
        let too_late = async {
            tokio::time::sleep(window * 2).await;
            batcher.call(&server, 3).await
        };
        tokio::join!(batcher.call(&server, 1), late, too_late)
    };
    tokio::select! {
        () = batcher.run(&server) => {}
        (one, two, three) = calls => {
            assert_eq!((one.unwrap(), two.unwrap(), three.unwrap()), (10, 20, 30));
        }
    }
    assert_eq!(server.requests(), [vec![1, 2], vec![3]]);
}

#[tokio::test(start_paused = true)]
async fn a_batched_call_is_sent_by_the_runner_and_its_future_is_small() {
    let (batcher, server) = (batcher(LIMITS), Server::new(1));
    let mut call = Box::pin(batcher.call_batched(7));
    assert!(call.as_mut().now_or_never().is_none());
    assert!(server.requests().is_empty(), "not from the caller's task");
    assert!(size_of_val(&*call) < size_of_val(&batcher.call(&server, 7)) / 2);
    tokio::select! {
        () = batcher.run(&server) => {}
        answer = call => assert_eq!(answer.unwrap(), 70),
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_calls_fail_when_the_store_cannot_be_reached() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut first = Box::pin(batcher.call(&server, 1));
    let mut second = Box::pin(batcher.call(&server, 2));
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    batcher.fail_waiting(&Error::new(ErrorKind::Unavailable, "no connection"));
    assert_eq!(second.await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(first.as_mut().now_or_never().is_none(), "it was sent");
}

#[tokio::test(start_paused = true)]
async fn close_fails_waiting_and_later_calls_and_a_request_in_flight_is_answered() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut calls: Vec<_> = (1..=2).map(|call| Box::pin(batcher.call(&server, call))).collect();
    for call in &mut calls {
        assert!(call.as_mut().now_or_never().is_none());
    }
    batcher.close(&Error::new(ErrorKind::Closed, "the backend was closed"));
    for refused in [calls.remove(1).await, batcher.call(&server, 3).await] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed, "without run");
    }
    server.permits.add_permits(1);
    assert_eq!(calls.remove(0).await.unwrap(), 10);
    assert_eq!(server.requests(), [[1]]);
}

#[tokio::test(start_paused = true)]
async fn close_fails_calls_whose_request_fails_later() {
    let (batcher, server) = (batcher(LIMITS), Server::new(0));
    let mut run = std::pin::pin!(batcher.run(&server));
    let calls = with_failed_request(&batcher, &server, &[2, 3]).await;
    settle(run.as_mut()).await;
    batcher.close(&Error::new(ErrorKind::Closed, "the backend was closed"));
    server.permits.add_permits(1);
    settle(run.as_mut()).await;
    for call in calls {
        let outcome = call.now_or_never().expect("it does not wait for another request");
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Closed);
    }
}
