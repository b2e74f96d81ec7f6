//! A web service in which one replica leads. Only the leader is ready, so a load balancer sends requests only to it.
//!
//! `cargo run -p simba-mutex --example axum_leader`

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use simba_mutex::{Contention, Simba};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// One replica of the service.
struct Replica {
    simba: Simba,
    contention: Arc<Contention>,
    address: SocketAddr,
}

impl Replica {
    async fn start(url: &str) -> Result<Self, Box<dyn Error>> {
        let simba = simba_mutex::connect(url).await?;
        let contention = Arc::new(simba.contend("web"));
        contention.start()?;
        let router = Router::new()
            .route("/live", get(|| async { "alive" }))
            .route("/ready", get(ready))
            .route("/work", get(work))
            .with_state(Arc::clone(&contention));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { simba, contention, address })
    }

    /// Shuts down as on SIGTERM: the work ends, the mutex is released, the next replica is woken.
    async fn stop(self) -> Result<(), Box<dyn Error>> {
        self.contention.stop().await?;
        self.simba.shutdown().await;
        Ok(())
    }

    /// Sends a request and returns the status code.
    async fn probe(&self, path: &str) -> Result<u16, Box<dyn Error>> {
        let mut stream = TcpStream::connect(self.address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        Ok(response.split(' ').nth(1).ok_or("no response")?.parse()?)
    }
}

async fn ready(State(contention): State<Arc<Contention>>) -> StatusCode {
    if contention.is_owner() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// Does work that only the leader may do, and only while it leads. Every write carries the token.
async fn work(State(contention): State<Arc<Contention>>) -> (StatusCode, String) {
    let Some(tenure) = contention.tenure() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "not leading".into());
    };
    let token = tenure.token();
    match tenure.run(async move { format!("written under token {token}") }).await {
        Ok(done) => (StatusCode::OK, done),
        Err(lost) => (StatusCode::SERVICE_UNAVAILABLE, lost.to_string()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("simba.db").display());
    let one = Replica::start(&url).await?;
    one.contention.acquired().await?;
    let two = Replica::start(&url).await?;
    println!("one: ready {}, work {}", one.probe("/ready").await?, one.probe("/work").await?);
    println!("two: ready {}, live {}", two.probe("/ready").await?, two.probe("/live").await?);
    assert_eq!((one.probe("/ready").await?, one.probe("/work").await?), (200, 200));
    assert_eq!(
        (two.probe("/ready").await?, two.probe("/work").await?, two.probe("/live").await?),
        (503, 503, 200)
    );

    one.stop().await?;
    two.contention.acquired().await?;
    println!("one has stopped; two: ready {}", two.probe("/ready").await?);
    assert_eq!(two.probe("/ready").await?, 200);
    two.stop().await
}
