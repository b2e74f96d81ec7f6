use std::sync::atomic::{AtomicUsize, Ordering};

use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Response};
use prost::Message;
use prost::bytes::Bytes;
use simba_core::SystemClock;
use simba_test_support::soon;
use tokio::net::{TcpListener, TcpStream};

use super::protocol::AuthenticateResponse;
use super::*;

#[test]
fn only_an_answer_of_the_same_member_in_the_same_term_confirms() {
    let term = |member_id, raft_term| Term::of(Some(&Header { member_id, revision: 1, raft_term }));
    assert!(term(1, 7).confirms(term(1, 7)));
    assert!(!term(1, 8).confirms(term(1, 7)) && !term(2, 7).confirms(term(1, 7)));
    assert!(!Term::of(None).confirms(Term::of(None)));
}

/// Answers as a server that requires a login and rejects the first token in a keep-alive. It answers a transaction after
/// the first keep-alive that succeeds.
async fn serve(socket: TcpStream, logins: Arc<AtomicUsize>) {
    let mut connection = h2::server::handshake(socket).await.unwrap();
    let (mut bodies, mut transactions, mut renewed) = (Vec::new(), Vec::new(), false);
    while let Some(Ok((request, respond))) = connection.accept().await {
        let (head, body) = request.into_parts();
        // A dropped body would reset its stream.
        bodies.push(body);
        match head.uri.path().rsplit('/').next().unwrap() {
            "Authenticate" => {
                let token = (logins.fetch_add(1, Ordering::SeqCst) + 1).to_string();
                answer(respond, &AuthenticateResponse { token });
            }
            "LeaseKeepAlive" if head.headers["token"] == "1" => reject(respond),
            "LeaseKeepAlive" => {
                answer(respond, &LeaseResponse { ttl: 7, ..LeaseResponse::default() });
                transactions.drain(..).for_each(|respond| answer(respond, &TxnResponse::default()));
                renewed = true;
            }
            "Txn" if !renewed => transactions.push(respond),
            "Txn" => answer(respond, &TxnResponse::default()),
            _ => answer(respond, &RangeResponse::default()),
        }
    }
}

fn head() -> http::response::Builder {
    Response::builder().header("content-type", "application/grpc")
}

fn answer(mut respond: SendResponse<Bytes>, message: &impl Message) {
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.encoded_len()).unwrap().to_be_bytes());
    message.encode(&mut frame).unwrap();
    let mut body = respond.send_response(head().body(()).unwrap(), false).unwrap();
    body.send_data(frame.into(), false).unwrap();
    let succeeded = [(http::HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))];
    body.send_trailers(HeaderMap::from_iter(succeeded)).unwrap();
}

fn reject(mut respond: SendResponse<Bytes>) {
    let unauthenticated = head().header("grpc-status", "16");
    let rejected = unauthenticated.header("grpc-message", "etcdserver: invalid auth token");
    respond.send_response(rejected.body(()).unwrap(), true).unwrap();
}

#[tokio::test]
async fn a_token_that_is_rejected_in_a_keep_alive_is_replaced_while_other_calls_continue() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("etcd://simba:secret@{}", listener.local_addr().unwrap()).parse().unwrap();
    let [connections, logins]: [Arc<AtomicUsize>; 2] = Default::default();
    let (accepted, logged_in) = (Arc::clone(&connections), Arc::clone(&logins));
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            accepted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(serve(socket, Arc::clone(&logged_in)));
        }
    });
    let config = EtcdConfig::from_url(&url).unwrap();
    let client = Client::start(Arc::new(config), Arc::new(SystemClock));
    client.ready().await.unwrap();
    let calls = async { tokio::join!(client.txn(TxnRequest::default()), client.keep_alive(1)) };
    let (transaction, kept) = soon("both calls are answered", calls).await;
    assert_eq!(kept.unwrap().map(|kept| kept.ttl), Some(Duration::from_secs(7)));
    assert!(transaction.is_ok(), "broken: a call in flight continues: {transaction:?}");
    assert_eq!((connections.load(Ordering::SeqCst), logins.load(Ordering::SeqCst)), (1, 2));
}
