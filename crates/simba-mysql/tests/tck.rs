//! The whole conformance suite on the shared MariaDB and MySQL, as the least-privilege user, behind a fault
//! proxy.

mod common;

mod on_mariadb {
    simba_tck::suite!(crate::common::MySql::shared());
}

mod on_mysql {
    simba_tck::suite!(crate::common::Product::MySql.fixture());
}
