//! Leading by a closure, and the ways to stop work: a cancellation token, a shutdown with a timeout.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::pin::pin;
use std::sync::Arc;

use common::{NAME, TOTAL, World, ms, settled};
use futures_util::poll;
use simba_core::{ErrorKind, Loss, Status};
use simba_tck::{Passage, Switch};

#[tokio::test(start_paused = true)]
async fn lead_runs_the_work_in_every_tenure_until_a_run_completes_and_frees_the_mutex() {
    let world = World::new();
    let (simba, switch) = world.handle();
    let contention = simba.contend(NAME);
    let mut tokens = Vec::new();
    let output = contention.lead(|tenure| {
        tokens.push(tenure.token());
        let (first, switch) = (tokens.len() == 1, Arc::clone(&switch));
        async move {
            if first {
                // The store hangs, so the tenure ends and the run is dropped.
                switch.set(Passage::HANG);
                let _back = Restored(switch);
                std::future::pending::<()>().await;
            }
            "done"
        }
    });
    assert_eq!(output.await.unwrap(), "done");
    assert_eq!(tokens.len(), 2);
    assert!(tokens[0] < tokens[1], "{tokens:?}");
    assert_eq!(contention.status(), Status::Idle);
    world.assert_empty().await;
}

/// Ends the fault when the run is dropped.
struct Restored(Arc<Switch>);

impl Drop for Restored {
    fn drop(&mut self) {
        self.0.set(Passage::CLEAR);
    }
}

#[tokio::test(start_paused = true)]
async fn lead_ends_with_an_error_when_the_contention_is_stopped() {
    let world = World::new();
    let contention = Arc::new(world.simba().contend(NAME));
    let leads = tokio::spawn({
        let contention = Arc::clone(&contention);
        async move { contention.lead(|_| std::future::pending::<()>()).await }
    });
    settled().await;
    assert!(contention.is_owner());
    contention.stop().await.unwrap();
    assert_eq!(leads.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn panic_of_the_work_frees_the_mutex_while_the_contention_exists() {
    for before_future in [false, true] {
        let world = World::new();
        let contention = Arc::new(world.simba().contend(NAME));
        let leads = tokio::spawn({
            let contention = Arc::clone(&contention);
            let work = move |_| {
                assert!(!before_future, "before the future");
                async move { assert!(before_future, "in the future") }
            };
            async move { contention.lead(work).await }
        });
        assert!(leads.await.unwrap_err().is_panic());
        world.assert_empty().await;
        assert_eq!(contention.status(), Status::Idle);
        let again = contention.lead(|tenure| async move { tenure.is_held() }).await;
        assert!(again.unwrap(), "it can be started again");
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_lead_drops_the_work_and_the_contention_goes_on() {
    let world = World::new();
    let contention = world.simba().contend(NAME);
    let (working, dropped) = tokio::sync::oneshot::channel::<()>();
    let mut working = Some(working);
    {
        let lead = contention.lead(|_| {
            let working = working.take();
            async move {
                std::future::pending::<()>().await;
                drop(working);
            }
        });
        let mut lead = pin!(lead);
        while !contention.is_owner() {
            assert!(poll!(&mut lead).is_pending());
            settled().await;
        }
        assert!(poll!(&mut lead).is_pending());
    }
    assert!(dropped.await.is_err());
    world.sleep(3 * TOTAL).await;
    assert!(contention.is_owner());
    contention.stop().await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn cancellation_token_is_cancelled_when_the_work_should_stop() {
    let world = World::new();
    let (simba, switch) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let token = guard.tenure().cancellation_token();
    world.sleep(3 * TOTAL).await;
    assert!(!token.is_cancelled() && !guard.is_expiring(), "renewals succeed");
    switch.set(Passage::HANG);
    token.cancelled().await;
    assert!(guard.is_expiring() && guard.is_held());
    assert_eq!(guard.lost().await, Loss::Deadline);
    assert_eq!(guard.release().await.unwrap_err().loss(), Some(&Loss::Deadline));
}

#[tokio::test(start_paused = true)]
async fn shutdown_with_a_timeout_ends_by_it() {
    let world = World::new();
    let (simba, switch) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    switch.set(Passage::HANG);
    let (begun, limit) = (world.now(), ms(100));
    let error = simba.shutdown_timeout(limit).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!(world.now() - begun, limit);
    switch.set(Passage::CLEAR);
    simba.shutdown_timeout(TOTAL).await.unwrap();
    drop(guard);
    world.assert_empty().await;
}
