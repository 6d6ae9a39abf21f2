//! Machines where the GPU cannot be used, and the resulting errors.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use cuda_mock::{self as mock, Level, each, isolated};
use gio_kernels::cuda::{CudaDriver, CudaError, CudaStream, ErrorCode, StreamKind, WritesOrdering};

use crate::rig;

#[test]
fn without_a_driver() {
    isolated("load::without_a_driver", Level::Nothing, &[], || {
        // SAFETY: opens the machine's own libcuda, if present.
        if unsafe { cudarc::driver::sys::is_culib_present() } {
            return; // this machine has a driver: the loader finds it in any case
        }
        let error = CudaDriver::load().expect_err("no library");
        assert_eq!(error, CudaError::NoLibrary);
        let text = error.to_string();
        assert!(text.contains("libcuda") && text.contains("install the driver"), "{text}");
    });
}

#[test]
fn without_a_device() {
    let nothing = [("MOCK_CUDA_INJECT", "cuInit:0:100"), ("MOCK_CUDA_DEVICES", "0")];
    let cases = [&nothing[..1], &nothing[1..]];
    each("load::without_a_device", Level::Full, &cases, |_| {
        let error = CudaDriver::load().expect_err("no GPU");
        assert_eq!(error, CudaError::NoDevice);
        assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES"), "{error}");
    });
}

#[test]
fn a_driver_that_does_not_start() {
    let broken = [("MOCK_CUDA_INJECT", "cuInit:0:803")];
    isolated("load::a_driver_that_does_not_start", Level::Full, &broken, || {
        let error = CudaDriver::load().expect_err("the kernel module is another one");
        assert_eq!(error.code(), Some(ErrorCode(803)));
        let text = error.to_string();
        assert!(
            text.contains("cuInit") && text.contains("803") && text.contains("reboot"),
            "{text}"
        );
    });
}

#[test]
fn an_old_driver() {
    isolated("load::an_old_driver", Level::Old, &[], || {
        let text = CudaDriver::load().expect_err("too old").to_string();
        for word in ["CUDA 11.4", "cuStreamWaitValue32_v2", "update"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        // Green contexts are not required.
        assert!(!text.contains("cuGreenCtxCreate"), "{text}");
    });
}

#[test]
fn a_device_that_is_not_there() {
    let two = [("MOCK_CUDA_DEVICES", "2")];
    isolated("load::a_device_that_is_not_there", Level::Full, &two, || {
        let driver = CudaDriver::load().expect("a driver");
        assert_eq!((driver.version(), driver.devices()), (13_000, 2));
        for ordinal in [2, u32::MAX] {
            let error = driver.device(ordinal).expect_err("0 and 1");
            assert_eq!(error, CudaError::NoSuchDevice { ordinal, count: 2 });
        }
        drop(driver.device(1).expect("the second one"));
        mock::assert_clean();
    });
}

#[test]
fn a_report() {
    isolated("load::a_report", Level::Full, &[], || {
        let device = rig::gpu();
        let report = device.report();
        assert_eq!((report.name.as_str(), report.pci.as_str()), ("Mock GPU", "0000:65:00"));
        assert_eq!((report.sms, report.capability, report.driver_version), (132, (9, 0), 13_000));
        assert_eq!(report.writes_ordering, WritesOrdering::Owner);
        assert!(report.host_register && !report.flush_remote_writes);
        let text = report.to_string();
        assert!(text.contains("compute capability 9.0") && text.contains("CUDA 13.0"), "{text}");
    });
}

#[test]
fn a_partition_is_rounded_up_and_says_so() {
    isolated("load::a_partition_is_rounded_up_and_says_so", Level::Full, &[], || {
        let device = rig::gpu();
        let stream = CudaStream::new(&device, Some(3)).expect("a stream");
        let report = stream.report().clone();
        assert_eq!((report.asked, report.granted, report.remaining), (Some(3), 4, 128));
        assert_eq!(report.kind, StreamKind::Green);
        let text = report.to_string();
        assert!(text.contains("green context of 4 SMs (3 asked for"), "{text}");
        for sms in [0, 133] {
            let error = CudaStream::new(&device, Some(sms)).expect_err("no such part");
            assert!(error.to_string().contains("1 to 132"), "{error}");
        }
        // On a driver that rejects the fine division, the coarse one is used.
        mock::inject("cuDevSmResourceSplitByCount", 0, 1);
        let coarse = CudaStream::new(&device, Some(3)).expect("a stream");
        assert_eq!((coarse.report().granted, coarse.report().granularity), (8, Some(8)));
        let plain = CudaStream::new(&device, None).expect("a stream");
        let kind = StreamKind::Priority { priority: -5, instead: None };
        assert_eq!((plain.report().granted, &plain.report().kind), (132, &kind));
        drop((stream, coarse, plain, device));
        mock::assert_clean();
    });
}

fn priority_instead(word: &str) {
    let device = rig::gpu();
    let stream = CudaStream::new(&device, Some(4)).expect("a stream all the same");
    let StreamKind::Priority { priority: -5, instead: Some(why) } = &stream.report().kind else {
        panic!("{:?}", stream.report());
    };
    assert!(why.contains(word), "{why}");
    let text = stream.report().to_string();
    assert!(text.contains("all 132 SMs, NOT on 4 of its own"), "{text}");
    drop((stream, device));
    mock::assert_clean();
}

#[test]
fn without_green_contexts() {
    isolated("load::without_green_contexts", Level::Twelve, &[], || priority_instead("CUDA 12.5"));
}

#[test]
fn with_green_contexts_that_fail() {
    let calls = ["cuDeviceGetDevResource", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"];
    let refused = calls.map(|call| format!("{call}:0:801"));
    let variables = refused.each_ref().map(|text| [("MOCK_CUDA_INJECT", text.as_str())]);
    let cases = variables.each_ref().map(|one| one.as_slice());
    each("load::with_green_contexts_that_fail", Level::Full, &cases, |_| {
        priority_instead("CUDA_ERROR_NOT_SUPPORTED");
    });
}
