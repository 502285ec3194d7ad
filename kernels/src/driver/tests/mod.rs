//! What holds on every machine; what needs a GPU is in `gpu`.

use super::*;

mod gpu;

#[test]
fn every_entry_gives_the_same_typed_reason_where_no_device_can_be_used() {
    match available() {
        Ok(()) => {
            let count = Device::count().unwrap();
            let error = Device::open(count).unwrap_err();
            assert_eq!(error, DriverError::NoSuchDevice { ordinal: count, count });
        }
        Err(reason) => {
            assert!(reason.to_string().contains(": "), "no next step in: {reason}");
            assert_eq!(Device::open(0), Err(reason.clone()));
            match Device::count() {
                Ok(count) => assert_eq!((count, reason), (0, DriverError::NoDevice)),
                Err(again) => assert_eq!(again, reason),
            }
        }
    }
}

#[test]
fn an_address_moves_by_bytes() {
    assert_eq!(DevicePointer(0x1000).add(3), DevicePointer(0x1003));
}
