//! Calls of sessions that are sent together or delayed, and what the table shows.

use std::task::Poll;

use mysql_async::prelude::Queryable;
use simba_core::spi::{Answer, Prior, Session};
use simba_core::{FencingToken, Lease, MutexName, Simba};
use simba_tck::FaultProxy;

use super::{Product, SECOND, simba};

/// Returns the token of an acquired mutex.
pub(crate) fn token(answer: Answer) -> Option<FencingToken> {
    match answer {
        Answer::Ours(ours) => ours.token,
        other => panic!("not acquired: {other:?}"),
    }
}

/// Delays the next request that names this mutex: as text if the statement is prepared, as hexadecimal bytes
/// if not.
pub(crate) fn hold_next_request_for(proxy: &FaultProxy, mutex: &MutexName) -> simba_tck::Held {
    let codes: String = mutex.as_str().bytes().map(|byte| format!("{byte:02x}")).collect();
    proxy.hold_next_request_with(&[mutex.as_str(), &codes])
}

/// Returns the owner that the row of this mutex names.
pub(crate) async fn owner_on(on: Product, mutex: &MutexName) -> String {
    let mut admin = super::admin(&on.admin_url()).await;
    let owner = "SELECT owner_id FROM simba_mutex WHERE mutex = ?";
    admin.exec_first(owner, (mutex.as_str(),)).await.unwrap().unwrap()
}

/// Sends all calls together, then waits for the answers.
pub(crate) async fn contend_all(
    sessions: &mut [Box<dyn Session>],
    prior: Prior,
) -> Vec<simba_core::Result<Answer>> {
    let mut calls: Vec<_> = sessions.iter_mut().map(|session| session.contend(prior)).collect();
    let answered = poll_once(&mut calls).await;
    outcomes(calls, answered).await
}

/// Polls each call once, which puts it into the queue of its connection. Returns what has ended already: on a
/// busy machine a call may be answered meanwhile.
pub(crate) async fn poll_once<T>(calls: &mut [impl Future<Output = T> + Unpin]) -> Vec<Poll<T>> {
    std::future::poll_fn(|context| {
        Poll::Ready(calls.iter_mut().map(|call| std::pin::Pin::new(call).poll(context)).collect())
    })
    .await
}

/// Waits for the calls that have not ended yet. Returns the outcomes of all.
pub(crate) async fn outcomes<T>(calls: Vec<impl Future<Output = T>>, ended: Vec<Poll<T>>) -> Vec<T> {
    let mut outcomes = Vec::new();
    for (call, ended) in calls.into_iter().zip(ended) {
        outcomes.push(match ended {
            Poll::Ready(outcome) => outcome,
            Poll::Pending => call.await,
        });
    }
    outcomes
}

/// Creates a table with one row of this version.
pub(crate) async fn table_at(on: Product, table: &str, column: &str, version: u64) -> (Simba, MutexName) {
    let address = on.shared().await;
    let mut admin = super::admin(&on.admin_url()).await;
    admin.query_drop(format!("DROP TABLE IF EXISTS {table}")).await.unwrap();
    let create = "CREATE TABLE {table} (mutex VARCHAR(66) NOT NULL PRIMARY KEY, acquired_at BIGINT UNSIGNED NOT NULL, \
                  ttl_at BIGINT UNSIGNED NOT NULL, transition_at BIGINT UNSIGNED NOT NULL, \
                  owner_id CHAR(32) NOT NULL, version {column} NOT NULL)";
    admin.query_drop(create.replace("{table}", table).replace("{column}", column)).await.unwrap();
    let mutex = super::name("row44");
    let insert = format!("INSERT INTO {table} VALUES (?, 0, 0, 0, '', ?)");
    admin.exec_drop(insert, (mutex.as_str(), version)).await.unwrap();
    for grant in super::grants(table) {
        admin.query_drop(grant).await.unwrap();
    }
    // Every write increases the version. With this lease nothing is renewed, and no call is repeated.
    let lease = Lease::new(30 * SECOND, 30 * SECOND).unwrap();
    (simba(&format!("{}?table={table}", super::least_url(address))).await.with_lease(lease), mutex)
}
